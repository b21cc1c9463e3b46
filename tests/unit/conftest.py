"""How long an example of hypothesis takes says more of the machine than of the code: no example is too slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("plait", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("plait")
