"""`profile`: a few steps of a run, looked at closely."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from plait.config.base import PathText, PositiveInt, Section

EARLIEST = 4
"""The first step that can be recorded; those before it warm up, are counted, and let the profiler get ready."""


class ProfileConfig(Section):
    """Where the time and the memory of a step go, measured on a few steps of the run; see profile.md."""

    builds = "plait.runner.profile.hook:Profile"

    start: Annotated[PositiveInt, Field(ge=EARLIEST)] = 10
    """First step that is recorded, counted from where the run begins or resumes. The steps before it warm up."""
    steps: PositiveInt = 3
    """So many are recorded."""
    folder: PathText | None = None
    """For the page, the figures and a trace of each rank. Absent: `profile` in `work_dir`."""
