"""Profiling: where a step's time and memory go, from a few recorded steps of a run.

`marks` names phases and modules in a trace, `trace` reads it back, `slices` and `account` give each moment to one of
the `kinds`. `count` looks into one step for arithmetic, messages and memory. `messages` and `modules` bring both
together; `table`, `picture` and `page` show it. `hook` says when all of this happens.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.profile.hook import Profile as Profile
    from plait.profile.page import grids as grids
    from plait.profile.page import headline as headline
    from plait.profile.report import Report as Report
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "hook": ["Profile"],
            "page": ["grids", "headline"],
            "report": ["Report"],
        },
    )
