"""`strategy.offload`: memory beyond the device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from plait.config.base import Many, NonNegativeInt, PathText, PositiveInt, Shorthand

Tier = Literal["none", "cpu", "nvme"]


class OffloadConfig(Shorthand):
    """What lives in host memory or in files rather than on the device. A word says where the optimizer does."""

    optimizer: Tier = "none"
    """Where the fp32 weights and the optimizer's state live."""
    update: Literal["auto", "cpu", "device"] = "auto"
    """Who computes the update: the CPU, or the device, which states visit in pieces. `auto`: a CUDA device does whose
    link is faster than its share of the host's cores, or with 8-bit moments; not with `delayed` or `params`."""
    params: Tier = "none"
    """Where the weights live that compute, between their uses; goes with `zero: 3`."""
    activations: Literal["none", "all"] | Many[str] = "none"
    """What units save for the backward pass waits in host memory: of `all`, or of those that fit patterns of names."""
    path: PathText | None = None
    """Folder of the `nvme` tier, best on a local disk. Absent: `offload` in `work_dir`."""
    budget_gib: PositiveFloat | None = None
    """With `optimizer: nvme`: host memory of one rank for what passes through. Absent: as `bucket_mb` asks."""
    bucket_mb: PositiveFloat = 256.0
    """fp32 weights that are updated as one; while one bucket computes, others travel."""
    ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | Literal["auto"] = 0.0
    """Share of the weights whose update stays on the device. `auto`: what the plan finds, with `plait train`."""
    host_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """With `optimizer: nvme`: share of the weights whose state stays in host memory, beyond `budget_gib`."""
    delayed: bool = False
    """A step's update runs beside the next step, which still computes with the weights from before it."""
    prefetch_params: NonNegativeInt = 50_000_000
    """With `params`: weights of coming units that are read ahead, at most so many numbers; the next unit however large
    it is, unless this is 0."""
    live_params: PositiveInt = 1_000_000_000
    """With `params`: at most so many numbers in memory at one time, beyond what the unit in use needs."""
    persistent_params: NonNegativeInt = 100_000
    """With `params`: weights of units with fewer numbers than this stay in memory."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is where the optimizer lives."""
        return {"optimizer": value} if isinstance(value, str) else value

    @property
    def on(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer != "none"

    @property
    def share(self) -> float:
        """`ratio` as a number; what `auto` will be is not known here, and counts as nothing."""
        return 0.0 if self.ratio == "auto" else self.ratio

    @property
    def uses_files(self) -> bool:
        """Whether anything lies in files."""
        return "nvme" in (self.optimizer, self.params)
