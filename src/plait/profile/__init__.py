"""Profiling: where a step's time and memory go, from a few recorded steps of a run.

`hook` decides which steps are counted and which are recorded. `marks` names phases and modules in a trace; `count` runs
one step under a recorder, for arithmetic, messages and memory; `breakdown` reads the trace back and gives each moment
to one category; `report` joins both; `page` shows them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.profile.hook import Profile as Profile
    from plait.profile.page import grids as grids
    from plait.profile.page import headline as headline
    from plait.profile.report import Report as Report
else:
    from plait.lazy import attach_names

    attach_names(__name__)
