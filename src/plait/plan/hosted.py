"""What a step does away from the device: the update on the host, and what travels between the two.

[Note: what an offloaded step waits for] Gradients leave during the last backward pass, and hold a step up where they
take longer than it. Then the update runs on the host, bucket by bucket: memory decides how fast, and files where they
are slower. New weights travel back beside it. The next forward pass begins at once and comes to the buckets in the
order in which they are updated, so the update shows where it takes longer than one forward pass: in full where that
cannot begin before all weights are there, and not before it is longer than a whole step where it is a step late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from plait.config import Layout, RunConfig
from plait.parallel import updates_on_device
from plait.plan.hardware import Hardware
from plait.precision import make_policy

Mode = Literal["beside", "waited", "late"]
"""What an update overlaps with: the next forward pass, nothing, or the whole next step."""
_EIGHT_BIT = 90e6
"""Numbers with 8-bit moments that a core updates in a second: that much is arithmetic, not memory."""


_DIRECT = 1.5e9
"""Bytes a second of host memory that devices copied, for each GB/s that cores reached in an update."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """Seconds of one step's update, by who is busy."""

    host: float = 0.0
    """The CPU, with what is in host memory."""
    through: float = 0.0
    """The CPU, with what is in files; their gradients come to the host then."""
    files: float = 0.0
    """The disk, reading and writing, beside that."""
    back: float = 0.0
    """The link to the device: new weights."""

    @property
    def seconds(self) -> float:
        """Until the last weight is where the model looks for it."""
        return max(self.host + max(self.through, self.files), self.back)

    def shows(self, mode: Mode, *, forward: float, step: float) -> float:
        """How much longer a step takes for it; `forward` is one forward pass, `step` the step without it."""
        if mode == "waited":
            return self.seconds
        if mode == "beside":
            return max(0.0, self.seconds - forward)
        return max(0.0, self.host + max(self.through, self.files) - step) + self.back

    def to_dict(self, mode: Mode) -> dict[str, float]:
        """As an account keeps it."""
        return {f"update.{mode}.{key}": value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Away:
    """How many numbers of one rank are updated where, and how many new weights travel back."""

    on_host: float = 0.0
    in_files: float = 0.0
    back: float = 0.0


def host_work(
    away: Away, config: RunConfig, hardware: Hardware, layout: Layout, *, state: float, wide: bool
) -> HostWork:
    """What updating so many numbers takes, on a host that all its ranks share.

    `state`: bytes that the optimizer keeps for each; `wide`: gradients come in the format in which they are summed.
    """
    policy = make_policy(config.precision)
    ranks = min(layout.size, hardware.per_host)
    computed = policy.compute.itemsize if policy.mixed else 4
    gradient = policy.reduce.itemsize if wide and policy.mixed else computed
    # The weights are read again to be copied where nothing has to be rounded on the way.
    moved = gradient + 2 * (4 + state) + (computed if computed < 4 else 2 * computed)
    each = moved / (hardware.host_gbps * 1e9)
    if config.optim.type == "AdamW8bit":
        each = max(each, 1.0 / (_EIGHT_BIT * hardware.host_cores))
    link = hardware.pcie_gbps * 1e9 if hardware.kind == "cuda" else float("inf")
    files = away.in_files * 2 * (4 + state) * ranks / (hardware.disk_gbps * 1e9)
    if device_updates(config, hardware, layout):
        # States come, with a gradient that waited on the host, while others go; host memory serves all ranks' links.
        comes = max(
            (4 + state + gradient) / link, (gradient + 2 * (4 + state)) * ranks / (_DIRECT * hardware.host_gbps)
        )
        return HostWork(host=away.on_host * comes, through=away.in_files * comes, files=files)
    fetched = away.in_files * gradient / link
    return HostWork(
        host=away.on_host * each * ranks,
        through=away.in_files * each * ranks + fetched,
        files=files,
        back=away.back * computed / link,
    )


def device_updates(config: RunConfig, hardware: Hardware, layout: Layout) -> bool:
    """Whether the devices of this machine compute the update of what is offloaded."""
    cores = hardware.host_cores / min(layout.size, hardware.per_host)
    return updates_on_device(config, hardware.kind, cores=cores, link_gbps=lambda: hardware.pcie_gbps)


def with_update(config: RunConfig, hardware: Hardware, layout: Layout) -> RunConfig:
    """The run with a word for who computes its updates: `auto` asks the machine it runs on, which may be another."""
    if not config.strategy.offload.on or config.strategy.offload.update != "auto":
        return config
    who = "device" if device_updates(config, hardware, layout) else "cpu"
    offload = config.strategy.offload.model_copy(update={"update": who})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"offload": offload})})


def mode_of(config: RunConfig, layout: Layout, kind: str) -> Mode:
    """What the update of a run overlaps with."""
    strategy = config.strategy
    if kind == "cpu":
        return "waited"  # it takes the cores that compute
    if strategy.offload.delayed:
        return "late"
    together = strategy.compile.enabled or strategy.forward_prefetch > 0  # nobody waits inside compiled code
    summed = strategy.stage == 0 and layout.replicas > 1  # the next backward pass fills the buckets again
    return "waited" if together or summed or layout.pp > 1 else "beside"


def read_work(numbers: Mapping[str, float]) -> tuple[HostWork, Mode]:
    """What an account keeps of an update."""
    for mode in ("beside", "waited", "late"):
        start = f"update.{mode}."
        found = {key.removeprefix(start): value for key, value in numbers.items() if key.startswith(start)}
        if found:
            return HostWork(**found), mode
    return HostWork(), "beside"
