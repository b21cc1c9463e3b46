"""`plait prove`: the same maths under a strategy as on one process, shown on the user's own run. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.prove.certificate import Certificate as Certificate
    from plait.prove.certificate import Finding as Finding
    from plait.prove.certificate import judge as judge
    from plait.prove.compare import compare as compare
    from plait.prove.dropout import Switch as Switch
    from plait.prove.job import Trace as Trace
    from plait.prove.prove import prove as prove
    from plait.prove.record import nudge_weights as nudge_weights
    from plait.prove.record import running_statistics as running_statistics
    from plait.prove.tolerance import Rounding as Rounding
    from plait.prove.tolerance import rounding_of as rounding_of
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "certificate": ["Certificate", "Finding", "judge"],
            "compare": ["compare"],
            "dropout": ["Switch"],
            "job": ["Trace"],
            "prove": ["prove"],
            "record": ["nudge_weights", "running_statistics"],
            "tolerance": ["Rounding", "rounding_of"],
        },
    )
