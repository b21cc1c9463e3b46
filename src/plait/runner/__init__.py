"""The Runner, its hooks and metrics."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.runner.forecast import Foresight as Foresight
    from plait.runner.hooks import Hook as Hook
    from plait.runner.metrics import Accuracy as Accuracy
    from plait.runner.metrics import Metric as Metric
    from plait.runner.profile import Profile as Profile
    from plait.runner.profile import Report as Report
    from plait.runner.profile.table import grids as grids
    from plait.runner.profile.table import headline as headline
    from plait.runner.runner import Runner as Runner
    from plait.runner.signals import STOPPED as STOPPED
    from plait.runner.sources import GivenObjects as GivenObjects
    from plait.runner.throughput import memory_mib as memory_mib
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "forecast": ["Foresight"],
            "hooks": ["Hook"],
            "metrics": ["Accuracy", "Metric"],
            "profile": ["Profile", "Report"],
            "profile.table": ["grids", "headline"],
            "runner": ["Runner"],
            "signals": ["STOPPED"],
            "sources": ["GivenObjects"],
            "throughput": ["memory_mib"],
        },
    )
