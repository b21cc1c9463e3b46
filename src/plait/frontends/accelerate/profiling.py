"""`accelerator.profile()`: torch's profiler around a part of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from plait.errors import ConfigError, Problem

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


@dataclass
class ProfileKwargs:
    """Options of `torch.profiler.profile`."""

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def build(self) -> profile:
        """The profiler that they describe."""
        unknown = [each for each in self.activities or () if each not in _ACTIVITIES]
        if unknown:
            remedy = f"Write {', '.join(_ACTIVITIES)}."
            raise ConfigError(Problem("ProfileKwargs.activities", f"{unknown[0]!r} is nothing to look at", remedy))
        return profile(
            activities=None if self.activities is None else [_ACTIVITIES[each] for each in self.activities],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def export(self, profiler: profile, rank: int) -> None:
        """Write the trace, one file a rank, where a folder was named."""
        if self.output_trace_dir is not None:
            folder = Path(self.output_trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))
