"""Profiling: where a step's time and memory go, from a few recorded steps of a run.

`marks` names phases and modules in a trace, `trace` reads it back, `slices` and `account` give each moment to one of
the `kinds`. `count` looks into one step for arithmetic, messages and memory. `messages` and `modules` bring both
together; `table`, `picture` and `page` show it. `hook` says when all of this happens.
"""

from plait.runner.profile.hook import Profile
from plait.runner.profile.report import Report

__all__ = ["Profile", "Report"]
