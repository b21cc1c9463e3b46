"""What a rank's step takes, as numbers that can be added and stretched.

[Note: a few layers stand for all] The layers of a decoder are alike, so what a step takes grows by the same amount with
each of them: every peak of memory, every second, every byte sent. Two short models give that amount. A peak is taken
apart first, because the highest moment moves: with few layers it may come when the backward pass begins, with many when
it ends, once all gradients are there. So the end of the backward pass has a number of its own, and the highest of all
is looked for last. Likewise a step's micro-batches are alike, after the first few: see `repeated`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.plan.hardware import Hardware
from plait.plan.hosted import read_work
from plait.spec import Phase

EACH = "each"
"""Part of a key: this comes with every micro-batch."""
ONCE = "once"
"""Part of a key: this comes once a step."""


@dataclass(frozen=True, slots=True)
class Account:
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

    def stretched(self, more: Account, times: float) -> Account:
        """This, and `times` the difference from this to `more`."""
        keys = self.numbers.keys() | more.numbers.keys()
        mine, other = self.numbers, more.numbers
        return Account({key: mine.get(key, 0) + times * (other.get(key, 0) - mine.get(key, 0)) for key in keys})

    def repeated(self, times: float) -> Account:
        """With so many times as many micro-batches. Memory stays: it was full before."""
        return Account({key: value * times if _comes_again(key) else value for key, value in self.numbers.items()})

    def widened(self, times: float) -> Account:
        """With so many times as many samples in each micro-batch, where what they take grows with them."""
        numbers = {key: value * times if _grows(key) else value for key, value in self.numbers.items()}
        for peak, size in self.under("peak").items():
            held = self.under(f"at.{peak}").items()
            growing = sum(value for whose, value in held if whose in _OF_SAMPLES)
            numbers[f"peak.{peak}"] = size + (times - 1.0) * growing
        return Account(numbers).settled()

    def settled(self) -> Account:
        """With the parts of the highest peak as its parts, where it is known whose the memory is at each.

        Which peak that is may be another one in a longer model, so parts are chosen after stretching.
        """
        numbers = {key: value for key, value in self.numbers.items() if not key.startswith("part.")}
        highest = max(self.under("peak").items(), key=_height)[0]
        held = self.under(f"at.{highest}").items()
        parts = {f"part.{whose}": size for whose, size in held if "." not in whose and size}
        return Account(numbers | parts)

    def total(self, *prefix: str) -> float:
        """The sum of all numbers whose names begin like this."""
        start = ".".join(prefix)
        return sum(value for key, value in self.numbers.items() if key == start or key.startswith(f"{start}."))

    def under(self, prefix: str) -> dict[str, float]:
        """The numbers whose names begin like this, by the rest of the name."""
        return {key.removeprefix(f"{prefix}."): v for key, v in self.numbers.items() if key.startswith(f"{prefix}.")}

    def peaks(self) -> dict[Phase, float]:
        """Bytes by phase."""
        found: dict[Phase, float] = {}
        for key, value in self.under("peak").items():
            phase = Phase(key.split(".")[0])
            found[phase] = max(found.get(phase, 0), value)
        return found

    @property
    def peak(self) -> tuple[Phase, float]:
        """The highest of them."""
        return max(self.peaks().items(), key=_height)

    def working(self) -> float:
        """How long forward and backward passes and the device's update take; see [Note: what overlaps]."""
        links = (self.numbers.get(f"link.{way}.{EACH}", 0.0) for way in ("in", "out", "files"))
        computing = self.total("compute") + self.total("waited")
        beside = max(computing, self.total("hidden"), self.total("host"), *links)
        leaving = self.numbers.get(f"link.out.{ONCE}", 0.0)
        return beside + max(0.0, leaving - self._one("backward"))

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
    words = key.split(".")
    if words[0] == "compute":
        return words[1] in (Phase.FORWARD, Phase.BACKWARD)
    if words[0] == "at":
        return words[-1] in _OF_SAMPLES
    return words[0] in ("flops", "tokens") or (words[0] in ("waited", "link") and words[-1] == EACH)


def _comes_again(key: str) -> bool:
    words = key.split(".")
    if words[0] in ("compute", "host"):
        return words[1] in (Phase.FORWARD, Phase.BACKWARD)
    return words[0] in ("flops", "tokens", "micro_batches") or words[-1] == EACH
