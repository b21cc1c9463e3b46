"""Profile a few steps of a run: the time of a step by category, its FLOPs, its communication and its memory.

`hook` decides which steps are counted and which are recorded with torch's profiler. `marks` adds named ranges of phases
and modules to the trace. `count` runs one step under a recorder, for FLOPs, messages (collectives, sends and receives)
and memory. `breakdown` reads the trace, and assigns one category to each moment. `report` combines both; `page` writes
them as HTML.
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
