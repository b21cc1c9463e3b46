"""The memory and time figures of one rank's step (a `Ledger`), which can be extrapolated to more layers.

[Note: a few layers stand for all] Layers of one kind are alike, so each adds the same amount to every figure of a step:
to each memory peak, to the seconds, and to the bytes sent. A simulation of a short model with all kinds, and one with a
layer more for each kind, give these amounts. `plan/layers.py` chooses the layers.
Peaks are kept apart by phase, because the highest of them depends on the number of layers: with few layers it may be at
the beginning of the backward pass, with many at its end, when all gradients exist. So the end of the backward pass has
a peak of its own, and the highest is chosen after the extrapolation. Likewise the micro-batches of a step are alike,
after the first few: see `repeated`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from plait.config import Layout, RunConfig
from plait.launch import Phase
from plait.optim import updates_on_device
from plait.plan.hardware import Hardware
from plait.precision import make_policy

# The update of an offloaded optimizer: its time on the host, and of the copies between host and device.
#
# [Note: what an offloaded step waits for] Gradients are copied to the host during the last backward pass; the copies
# delay a step only if they take longer than that pass. Then the host updates the weights, bucket by bucket, at the
# speed of its memory, or of files where these are slower. New weights are copied to the device meanwhile. The next
# forward pass begins at once, and needs the buckets in the order in which they are updated. So the update lengthens a
# step by the time beyond one forward pass (mode `beside`); by all of its time if the forward pass cannot begin before
# all weights are there (`waited`); and by the time beyond a whole step if weights are used one step late (`late`).


Mode = Literal["beside", "waited", "late"]
"""What an update overlaps with: the next forward pass, nothing, or the whole next step."""
_EIGHT_BIT = 90e6
"""Weights with 8-bit moments that a core updates in a second; the limit is arithmetic, not memory bandwidth."""


_DIRECT = 1.5e9
"""Bytes per second that devices copied from and to host memory, for each GB/s that cores reach in an update."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """Seconds of one step's update, by the resource that is busy."""

    host: float = 0.0
    """The CPU, for state in host memory."""
    through: float = 0.0
    """The CPU, for state in files, and the copies of their gradients to the host."""
    files: float = 0.0
    """The disk, for reading and writing that state meanwhile."""
    back: float = 0.0
    """The link to the device, for new weights."""

    @property
    def seconds(self) -> float:
        """Seconds until the last weight is updated and copied."""
        return max(self.host + max(self.through, self.files), self.back)

    def shows(self, mode: Mode, *, forward: float, step: float) -> float:
        """Return the seconds that it adds to a step. `forward`: of one forward pass; `step`: without the update."""
        if mode == "waited":
            return self.seconds
        if mode == "beside":
            return max(0.0, self.seconds - forward)
        return max(0.0, self.host + max(self.through, self.files) - step) + self.back

    def to_dict(self, mode: Mode) -> dict[str, float]:
        """Return it as entries of a `Ledger`, which `read_work` reads."""
        return {f"update.{mode}.{key}": value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Away:
    """How many weights of one rank are updated off the device (on_host, in_files), and how many are copied back."""

    on_host: float = 0.0
    in_files: float = 0.0
    back: float = 0.0


def host_work(
    away: Away, config: RunConfig, hardware: Hardware, layout: Layout, *, state: float, wide: bool
) -> HostWork:
    """Return the seconds of updating the weights `away`, as many on each rank of a host, whose cores they share.

    `state`: bytes of optimizer state per weight; `wide`: gradients have the format in which they are reduced
    (`precision.reduce`), else that of the computation.
    """
    policy = make_policy(config.precision)
    ranks = min(layout.size, hardware.per_host)
    computed = policy.compute.itemsize if policy.mixed else 4
    gradient = policy.reduce.itemsize if wide and policy.mixed else computed
    # fp32 weights are not rounded by the update, so the copy of a new weight reads and writes it once more.
    moved = gradient + 2 * (4 + state) + (computed if computed < 4 else 2 * computed)
    seconds_per_number = moved / (hardware.host_gbps * 1e9)
    if config.optim.type == "AdamW8bit":
        seconds_per_number = max(seconds_per_number, 1.0 / (_EIGHT_BIT * hardware.host_cores))
    link = hardware.pcie_gbps * 1e9 if hardware.kind == "cuda" else float("inf")
    files = away.in_files * 2 * (4 + state) * ranks / (hardware.disk_gbps * 1e9)
    if device_updates(config, hardware, layout):
        # States and gradients are copied to the device while others are copied back; all ranks share the host's memory.
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
    """Return whether the devices of this machine compute the update of offloaded weights."""
    cores = hardware.host_cores / min(layout.size, hardware.per_host)
    return updates_on_device(config, hardware.kind, cores=cores, link_gbps=lambda: hardware.pcie_gbps)


def with_update(config: RunConfig, hardware: Hardware, layout: Layout) -> RunConfig:
    """Return the run with `offload.update` resolved for `hardware`: `auto` would look at the machine that plans."""
    if not config.strategy.offload.on or config.strategy.offload.update != "auto":
        return config
    who = "device" if device_updates(config, hardware, layout) else "cpu"
    offload = config.strategy.offload.model_copy(update={"update": who})
    return config.model_copy(update={"strategy": config.strategy.model_copy(update={"offload": offload})})


def mode_of(config: RunConfig, layout: Layout, device_type: str) -> Mode:
    """Return what the update of a run overlaps with."""
    strategy = config.strategy
    if device_type == "cpu":
        return "waited"  # it runs on the cores that also compute the model
    if strategy.offload.delayed:
        return "late"
    together = strategy.compile.enabled or strategy.forward_prefetch > 0  # compiled code cannot wait for single buckets
    summed = strategy.stage == 0 and layout.replicas > 1  # the next backward pass fills the buckets again
    return "waited" if together or summed or layout.pp > 1 else "beside"


def read_work(numbers: Mapping[str, float]) -> tuple[HostWork, Mode]:
    """Return the update's seconds and mode from the numbers of a `Ledger`."""
    for mode in ("beside", "waited", "late"):
        start = f"update.{mode}."
        values = {key.removeprefix(start): value for key, value in numbers.items() if key.startswith(start)}
        if values:
            return HostWork(**values), mode
    return HostWork(), "beside"


PER_MICRO_BATCH = "each"
"""The last part of the names of figures that every micro-batch adds to."""
PER_STEP = "once"
"""The last part of the names of figures that are counted once per step."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The memory and time figures of one rank's step, by dotted names.

    Device memory, in bytes: `peak.<phase>` and `peak.backward.end`: the most in use then; `reserved`: by the allocator;
    `at.<peak>.<category>`: in use at each of these peaks, by the categories of `classify`; `part.<category>`: at the
    highest of them.
    Seconds: `compute.<phase>.<kind>` of the device, `host.<phase>` of starting operations;
    `hidden.<axes>.<each|once>` and `waited.<axes>.…` of communication that overlaps with computing and that does not;
    `link.<in|out|files>.…` of copies to the device, to the host, and of the files read for them;
    `update.<beside|waited|late>.…` of an update on the host. `sent.<axes>.…`: bytes sent.
    Host memory, in bytes: `host_state` and `host_rooms` for offloaded state and its buffers, `host_built`: the part of
    them that the build allocates; `host_reading` and `host_loading` while a checkpoint is read, for buffers and for
    states; `host_saving` while one is written; `host_copy` for the copy that is written in the background.
    `state`: bytes of this rank's tensors in a checkpoint; `written`: of those, what this rank writes.
    `flops`, `tokens`, `micro_batches`: per step. `<each>` figures sum over micro-batches, `<once>` occur once per step.
    """

    numbers: Mapping[str, float]

    def stretched(self, others: Sequence[tuple[Ledger, float]]) -> Ledger:
        """Return this ledger plus, for each (more, times), `times` the difference from it to `more`, by figure."""
        numbers = dict(self.numbers)
        for more, times in others:
            for key in self.numbers.keys() | more.numbers.keys():
                grown = more.numbers.get(key, 0.0) - self.numbers.get(key, 0.0)
                numbers[key] = numbers.get(key, 0.0) + times * grown
        return Ledger(numbers)

    def repeated(self, times: float) -> Ledger:
        """Return it for `times` as many micro-batches. Memory peaks do not change: fewer already reach them."""
        return Ledger({key: value * times if _comes_again(key) else value for key, value in self.numbers.items()})

    def widened(self, times: float) -> Ledger:
        """Return it for `times` as many samples in each micro-batch, if memory and time are proportional to them."""
        numbers = {key: value * times if _grows(key) else value for key, value in self.numbers.items()}
        for peak, size in self.under("peak").items():
            held = self.under(f"at.{peak}").items()
            growing = sum(value for whose, value in held if whose in _OF_SAMPLES)
            numbers[f"peak.{peak}"] = size + (times - 1.0) * growing
        return Ledger(numbers).settled()

    def settled(self) -> Ledger:
        """Return it with `part.…` set to the categories at the highest peak, if they are known.

        A longer model may have another highest peak, so this is called after an extrapolation.
        """
        numbers = {key: value for key, value in self.numbers.items() if not key.startswith("part.")}
        highest = max(self.under("peak").items(), key=_height)[0]
        held = self.under(f"at.{highest}").items()
        breakdown = {f"part.{whose}": size for whose, size in held if "." not in whose and size}
        return Ledger(numbers | breakdown)

    def total(self, *prefix: str) -> float:
        """Return the sum of all figures whose dotted names begin with these parts."""
        start = ".".join(prefix)
        return sum(value for key, value in self.numbers.items() if key == start or key.startswith(f"{start}."))

    def under(self, prefix: str) -> dict[str, float]:
        """Return the figures whose names begin with `prefix` and a dot, by the rest of the name."""
        return {key.removeprefix(f"{prefix}."): v for key, v in self.numbers.items() if key.startswith(f"{prefix}.")}

    def peaks(self) -> dict[Phase, float]:
        """Return phase → bytes at its highest peak."""
        sizes: dict[Phase, float] = {}
        for key, value in self.under("peak").items():
            phase = Phase(key.split(".")[0])
            sizes[phase] = max(sizes.get(phase, 0), value)
        return sizes

    @property
    def peak(self) -> tuple[Phase, float]:
        """The phase with the highest peak, and its bytes."""
        return max(self.peaks().items(), key=_height)

    def working(self) -> float:
        """Return the seconds of the forward and backward passes and the device's update; see [Note: what overlaps]."""
        links = (self.numbers.get(f"link.{way}.{PER_MICRO_BATCH}", 0.0) for way in ("in", "out", "files"))
        computing = self.total("compute") + self.total("waited")
        overlapped = max(computing, self.total("hidden"), self.total("host"), *links)
        leaving = self.numbers.get(f"link.out.{PER_STEP}", 0.0)
        return overlapped + max(0.0, leaving - self._one("backward"))

    def on_host(self) -> float:
        """Return the seconds of the update on the host, whether or not they overlap with the next step."""
        return read_work(self.numbers)[0].seconds

    def updating(self) -> float:
        """Return the seconds that the update on the host adds; see [Note: what an offloaded step waits for]."""
        work, mode = read_work(self.numbers)
        return work.shows(mode, forward=self._one("forward"), step=self.working())

    def seconds(self) -> float:
        """Return the seconds of the step."""
        return self.working() + self.updating()

    def _one(self, phase: str) -> float:
        """Return the device seconds of one micro-batch in a phase."""
        return self.total("compute", phase) / max(self.numbers.get("micro_batches", 1.0), 1.0)

    def needed(self, hardware: Hardware) -> float:
        """Return the bytes that the device must have: what is reserved, and what is in use before the first tensor."""
        return max(self.numbers["reserved"], self.peak[1]) + hardware.context_gib * 2**30


def _height(peak: tuple[str, float]) -> tuple[float, bool]:
    """Return the sort key of a peak: its bytes; of equal peaks, one that recurs in every step comes last."""
    name, size = peak
    return size, name not in (Phase.BUILD, Phase.LOAD, Phase.INIT, Phase.SAVE)


_OF_SAMPLES = ("activations", "temporaries", "communication")
"""Categories of memory that are proportional to the samples of a micro-batch."""


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


# The host memory of a rank's process.
#
# [Note: what malloc keeps] A simulated step counts the bytes of tensors, and on a CPU these are the bytes that a
# process asks malloc for. The resident memory of a process is more: the interpreter and its libraries, and memory that
# malloc keeps after it was freed. glibc maps large allocations one by one (`mmap`) and returns them to the kernel when
# they are freed. But it raises the threshold for that, up to 32 MiB, whenever such an allocation is freed. Sharded runs
# allocate and free many tensors of that size; these then come from one heap, which becomes fragmented. With a fixed
# threshold (`TIGHT_MALLOC`), resident memory equals the bytes of tensors to a few percent. Without it a rank keeps
# more, and ranks with the same work keep different amounts: about 10 % more with replicated parameters, up to two
# thirds more where parameters are gathered and freed. The fixed threshold costs time, 20 % of a step and more on a
# virtual machine, because the kernel clears new memory page by page.


PROCESS_BYTES = 372 * 2**20
"""Resident memory of a CPU rank after a step without its tensors: Python, torch and the modules that it loads."""
CUDA_PROCESS_GIB = 3.0
"""Host memory of a process with a GPU, before it has a model: torch, CUDA's libraries, pinned memory."""
TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Environment variables that make glibc return freed memory to the kernel; it reads them when a process starts."""


def host_bytes(ledger: Ledger, *, ranks: int = 1) -> float:
    """Return the peak resident memory, in bytes, of `ranks` CPU ranks with the figures of `ledger`.

    It holds with `TIGHT_MALLOC`; see [Note: what malloc keeps].
    """
    return ranks * (PROCESS_BYTES + ledger.peak[1])


def host_peaks(ledger: Ledger, hardware: Hardware) -> dict[Phase, float]:
    """Return phase → the most bytes of host memory that one rank's process has in it."""
    peaks = ledger.peaks()
    if hardware.kind == "cpu":
        return {phase: PROCESS_BYTES + size for phase, size in peaks.items()}

    def of(*names: str) -> float:
        return sum(ledger.numbers.get(f"host_{name}", 0.0) for name in names)

    sizes = dict.fromkeys(peaks, of("state", "rooms", "copy"))
    sizes |= {Phase.BUILD: of("built"), Phase.LOAD: of("built", "reading", "loading"), Phase.INIT: of("state", "rooms")}
    sizes[Phase.SAVE] = of("state", "rooms", "copy", "saving")
    return {phase: CUDA_PROCESS_GIB * 2**30 + sizes[phase] for phase in peaks}
