"""What a rank's step takes, as numbers that can be added and stretched.

[Note: a few layers stand for all] The layers of a decoder are alike, so what a step takes grows by the same amount with
each of them: every peak of memory, every second, every byte sent. Two short models give that amount. A peak is taken
apart first, because the highest moment moves: with few layers it may come when the backward pass begins, with many when
it ends, once all gradients are there. So the end of the backward pass has a number of its own, and the highest of all
is looked for last. Likewise a step's micro-batches are alike, after the first few: see `repeated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from plait.config import Layout, RunConfig
from plait.launch import Phase
from plait.optim import updates_on_device
from plait.plan.hardware import Hardware
from plait.precision import make_policy

# What a step does away from the device: the update on the host, and what travels between the two.
#
# [Note: what an offloaded step waits for] Gradients leave during the last backward pass, and hold a step up where they
# take longer than it. Then the update runs on the host, bucket by bucket: memory decides how fast, and files where they
# are slower. New weights travel back beside it. The next forward pass begins at once and comes to the buckets in the
# order in which they are updated, so the update shows where it takes longer than one forward pass: in full where that
# cannot begin before all weights are there, and not before it is longer than a whole step where it is a step late.


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
    seconds_per_number = moved / (hardware.host_gbps * 1e9)
    if config.optim.type == "AdamW8bit":
        seconds_per_number = max(seconds_per_number, 1.0 / (_EIGHT_BIT * hardware.host_cores))
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
        host=away.on_host * seconds_per_number * ranks,
        through=away.in_files * seconds_per_number * ranks + fetched,
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


def mode_of(config: RunConfig, layout: Layout, device_type: str) -> Mode:
    """What the update of a run overlaps with."""
    strategy = config.strategy
    if device_type == "cpu":
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
        values = {key.removeprefix(start): value for key, value in numbers.items() if key.startswith(start)}
        if values:
            return HostWork(**values), mode
    return HostWork(), "beside"


PER_MICRO_BATCH = "each"
"""Part of a key: this comes with every micro-batch."""
PER_STEP = "once"
"""Part of a key: this comes once a step."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The numbers of one rank, by dotted names.

    `peak.<phase>` and `peak.backward.end`, `reserved`: bytes. `at.<peak>.<whose>`: bytes at each of these moments;
    `part.<whose>`: at the highest.
    `compute.<phase>.<kind>`, `host.<phase>`: seconds. `sent.<axes>.<each|once>`: bytes;
    `hidden.<axes>.…` and `waited.<axes>.…`: seconds of messages that overlap with computing, and that do not.
    `link.<in|out|files>.…`: seconds of copies to the device, to the host, and of files read for them;
    `update.<beside|waited|late>.…`: seconds of an update on the host.
    `host_state`, `host_rooms`: bytes of host memory for what is offloaded, `host_built`: of that, what the build makes.
    `host_reading`, `host_loading`: bytes of host memory while a checkpoint is read, for what is on its way and for
    states; `host_saving`: while one is written; `host_copy`: for what is written in the background.
    `state`: bytes that a checkpoint has of this rank's tensors; `written`: of those, what this rank writes.
    `flops`, `tokens`, `micro_batches`.
    """

    numbers: Mapping[str, float]

    def stretched(self, more: Ledger, times: float) -> Ledger:
        """This, and `times` the difference from this to `more`."""
        keys = self.numbers.keys() | more.numbers.keys()
        mine, other = self.numbers, more.numbers
        return Ledger({key: mine.get(key, 0) + times * (other.get(key, 0) - mine.get(key, 0)) for key in keys})

    def repeated(self, times: float) -> Ledger:
        """With so many times as many micro-batches. Memory stays: it was full before."""
        return Ledger({key: value * times if _comes_again(key) else value for key, value in self.numbers.items()})

    def widened(self, times: float) -> Ledger:
        """With so many times as many samples in each micro-batch, where what they take grows with them."""
        numbers = {key: value * times if _grows(key) else value for key, value in self.numbers.items()}
        for peak, size in self.under("peak").items():
            held = self.under(f"at.{peak}").items()
            growing = sum(value for whose, value in held if whose in _OF_SAMPLES)
            numbers[f"peak.{peak}"] = size + (times - 1.0) * growing
        return Ledger(numbers).settled()

    def settled(self) -> Ledger:
        """With the parts of the highest peak as its parts, where it is known whose the memory is at each.

        Which peak that is may be another one in a longer model, so parts are chosen after stretching.
        """
        numbers = {key: value for key, value in self.numbers.items() if not key.startswith("part.")}
        highest = max(self.under("peak").items(), key=_height)[0]
        held = self.under(f"at.{highest}").items()
        breakdown = {f"part.{whose}": size for whose, size in held if "." not in whose and size}
        return Ledger(numbers | breakdown)

    def total(self, *prefix: str) -> float:
        """The sum of all numbers whose names begin like this."""
        start = ".".join(prefix)
        return sum(value for key, value in self.numbers.items() if key == start or key.startswith(f"{start}."))

    def under(self, prefix: str) -> dict[str, float]:
        """The numbers whose names begin like this, by the rest of the name."""
        return {key.removeprefix(f"{prefix}."): v for key, v in self.numbers.items() if key.startswith(f"{prefix}.")}

    def peaks(self) -> dict[Phase, float]:
        """Bytes by phase."""
        sizes: dict[Phase, float] = {}
        for key, value in self.under("peak").items():
            phase = Phase(key.split(".")[0])
            sizes[phase] = max(sizes.get(phase, 0), value)
        return sizes

    @property
    def peak(self) -> tuple[Phase, float]:
        """The highest of them."""
        return max(self.peaks().items(), key=_height)

    def working(self) -> float:
        """How long forward and backward passes and the device's update take; see [Note: what overlaps]."""
        links = (self.numbers.get(f"link.{way}.{PER_MICRO_BATCH}", 0.0) for way in ("in", "out", "files"))
        computing = self.total("compute") + self.total("waited")
        overlapped = max(computing, self.total("hidden"), self.total("host"), *links)
        leaving = self.numbers.get(f"link.out.{PER_STEP}", 0.0)
        return overlapped + max(0.0, leaving - self._one("backward"))

    def on_host(self) -> float:
        """How long an update on the host takes, beside whatever it is."""
        return read_work(self.numbers)[0].seconds

    def updating(self) -> float:
        """What an update on the host adds to that; see [Note: what an offloaded step waits for]."""
        work, mode = read_work(self.numbers)
        return work.shows(mode, forward=self._one("forward"), step=self.working())

    def seconds(self) -> float:
        """How long the step takes."""
        return self.working() + self.updating()

    def _one(self, phase: str) -> float:
        """The computing of one micro-batch in a phase."""
        return self.total("compute", phase) / max(self.numbers.get("micro_batches", 1.0), 1.0)

    def needed(self, hardware: Hardware) -> float:
        """Bytes that the device must have: what is reserved, and what is gone before the first tensor."""
        return max(self.numbers["reserved"], self.peak[1]) + hardware.context_gib * 2**30


def _height(peak: tuple[str, float]) -> tuple[float, bool]:
    """Of two that are as high as each other, the one that comes again and again is the peak."""
    name, size = peak
    return size, name not in (Phase.BUILD, Phase.LOAD, Phase.INIT, Phase.SAVE)


_OF_SAMPLES = ("activations", "temporaries", "communication")
"""Memory that grows with the samples of a micro-batch."""


def _grows(key: str) -> bool:
    path = key.split(".")
    if path[0] == "compute":
        return path[1] in (Phase.FORWARD, Phase.BACKWARD)
    if path[0] == "at":
        return path[-1] in _OF_SAMPLES
    return path[0] in ("flops", "tokens") or (path[0] in ("waited", "link") and path[-1] == PER_MICRO_BATCH)


def _comes_again(key: str) -> bool:
    path = key.split(".")
    if path[0] in ("compute", "host"):
        return path[1] in (Phase.FORWARD, Phase.BACKWARD)
    return path[0] in ("flops", "tokens", "micro_batches") or path[-1] == PER_MICRO_BATCH


# What a rank's process takes of its host's memory.
#
# [Note: what malloc keeps] A simulated step counts the bytes of tensors, and on a CPU these are the bytes that a
# process asks malloc for. What the kernel counts for a process, its resident memory, is more: the interpreter and its
# libraries, and what malloc keeps after it was freed. glibc maps large pieces one by one and gives them back at once,
# but it raises the size from which on it does so, up to 32 MiB, whenever such a piece is freed. Sharded runs make and
# free many pieces of that size; they end up in one heap, and holes between them stay. With the size fixed
# (`TIGHT_MALLOC`), resident memory follows the tensors to a few percent. Without it a rank keeps more, and two ranks
# that do the same keep different amounts: where parameters are replicated a tenth more, where they are gathered and
# freed up to two thirds. The price of the fixed size is time, a fifth of a step and more on a virtual machine, because
# memory that is new is cleared page by page.


PROCESS_BYTES = 372 * 2**20
"""Of a rank that has run a step: Python, torch and the modules that training loads, and their small things."""
CUDA_PROCESS_GIB = 3.0
"""Of a process with a GPU, before it has a model: torch, CUDA's libraries, pinned memory."""
TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Variables of the environment with which glibc gives memory back when it is free; read when a process starts."""


def host_bytes(ledger: Ledger, *, ranks: int = 1) -> float:
    """Resident memory that `ranks` CPU ranks need which do as `account` says, at their highest moment.

    That is what they have under `TIGHT_MALLOC`; see [Note: what malloc keeps].
    """
    return ranks * (PROCESS_BYTES + ledger.peak[1])


def host_peaks(ledger: Ledger, hardware: Hardware) -> dict[Phase, float]:
    """Bytes of host memory that one rank's process has in each phase, at its highest moment."""
    peaks = ledger.peaks()
    if hardware.kind == "cpu":
        return {phase: PROCESS_BYTES + size for phase, size in peaks.items()}

    def of(*names: str) -> float:
        return sum(ledger.numbers.get(f"host_{name}", 0.0) for name in names)

    sizes = dict.fromkeys(peaks, of("state", "rooms", "copy"))
    sizes |= {Phase.BUILD: of("built"), Phase.LOAD: of("built", "reading", "loading"), Phase.INIT: of("state", "rooms")}
    sizes[Phase.SAVE] = of("state", "rooms", "copy", "saving")
    return {phase: CUDA_PROCESS_GIB * 2**30 + sizes[phase] for phase in peaks}
