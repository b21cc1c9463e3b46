"""`deepspeed.runtime.zero`, which `deepspeed.zero` is short for."""

from plait.frontends.deepspeed.zero import GatheredParameters, Init, register_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]
