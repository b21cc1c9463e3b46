"""How long a step takes: every operation by its arithmetic, its memory traffic or its messages, whichever holds it up.

[Note: what overlaps] The host starts operations ahead of the device, so a step takes as long as the slower of the two.
Messages between data-parallel ranks travel while others compute, and show only where they take longer. Those inside a
layer (tensor, context and expert parallelism) and between pipeline stages are waited for. Copies between device and
host have links of their own, one each way; see [Note: what an offloaded step waits for] in `hosted`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import torch

from plait.config import Layout, RunConfig
from plait.plan.account import EACH, ONCE
from plait.plan.hardware import Hardware
from plait.plan.traffic import Message, message_of
from plait.plan.work import bytes_moved, computes_in, crosses, flops_of, starts_kernel
from plait.precision import make_policy
from plait.spec import Phase

_KERNEL_S = 2e-6
"""What a kernel takes on the device however small it is."""
_SUSTAINED = 0.95
"""The share of its best speed that a device keeps up in training."""
_EDGES = 0.3
"""Of the time that a matrix product's operands take to travel, the share that is not hidden behind arithmetic."""
_POLICY = 2.0
"""A policy that is asked about every operation doubles the host's work."""
_FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


class Timing:
    """Adds up the time of the operations that it sees."""

    def __init__(self, hardware: Hardware, config: RunConfig, layout: Layout) -> None:
        self._hardware, self._layout = hardware, layout
        self._fp32 = "tf32" if make_policy(config.precision).tf32 else "fp32"
        self._stage = config.strategy.stage
        selective = config.strategy.recompute.mode == "selective" and not config.strategy.compile.enabled
        self._start_s = hardware.launch_us * 1e-6 * (_POLICY if selective else 1.0)
        # Kernels of recorded passes are asked for all at once.
        records = config.strategy.graphs is True and hardware.kind == "cuda"
        self._recorded = (Phase.FORWARD, Phase.BACKWARD) if records else ()
        self._watching = True
        self.numbers: dict[str, float] = defaultdict(float)
        """What was seen so far, by the names that `Account` has for it."""

    def restart(self) -> None:
        """Forget what was seen so far."""
        self.numbers.clear()

    def stop(self) -> None:
        """See nothing any more."""
        self._watching = False

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operation was run."""
        if not self._watching:
            return
        message = message_of(func, args, out, self._layout)
        if message is not None:
            self._count_message(phase, message)
        elif (way := crosses(func, args, out)) is not None:
            self._count_copy(phase, way, out.nbytes)
        elif starts_kernel(func):
            flops, kind = flops_of(func, args, kwargs, out)
            self.add(phase, kind, flops, bytes_moved(func, args, kwargs, out), computes_in(func, args, out))

    def add(self, phase: Phase, kind: str, flops: int, moved: int, dtype: torch.dtype, kernels: int = 1) -> None:
        """Count an operation of so many FLOPs that moves so many bytes."""
        if not self._watching:
            return
        self.numbers[f"compute.{phase}.{kind}"] += self.seconds(kind, flops, moved, dtype)
        self._count_starts(phase, kernels)
        self.numbers["flops"] += flops

    def _count_starts(self, phase: Phase, kernels: int = 1) -> None:
        if phase not in self._recorded:
            self.numbers[f"host.{phase}"] += kernels * self._start_s

    def seconds(self, kind: str, flops: int, moved: int, dtype: torch.dtype) -> float:
        """How long the device takes for it."""
        machine = self._hardware
        travel = moved / (machine.memory_gbps * 1e9 * machine.memory_efficiency)
        if not flops:
            return max(travel, _KERNEL_S)
        word = _FORMATS.get(dtype, "fp32")
        rate = machine.rate(self._fp32 if word == "fp32" else word) * _SUSTAINED
        if kind == "attention":
            return max(flops / (rate * machine.attention_efficiency), travel, _KERNEL_S)
        return flops / rate + _EDGES * travel + _KERNEL_S

    def _count_message(self, phase: Phase, message: Message) -> None:
        how = "hidden" if message.is_data_parallel else "waited"
        when = EACH if self._comes_again(message) else ONCE
        self.numbers[f"{how}.{message.axis}.{when}"] += message.seconds(self._hardware)
        self.numbers[f"sent.{message.axis}.{when}"] += message.sent
        self._count_starts(phase)

    def _count_copy(self, phase: Phase, way: Literal["out", "in"], size: int) -> None:
        # Gradients leave with the last micro-batch; activations and weights come and go with each.
        each = phase is Phase.FORWARD or (phase is Phase.BACKWARD and way == "in")
        self.numbers[f"link.{way}.{EACH if each else ONCE}"] += size / (self._hardware.pcie_gbps * 1e9)
        self._count_starts(phase)

    def _comes_again(self, message: Message) -> bool:
        """Whether every micro-batch sends it: between data-parallel ranks, ZeRO decides."""
        if not message.is_data_parallel:
            return True
        return self._stage == 3 or (self._stage == 2 and message.kind != "gather")
