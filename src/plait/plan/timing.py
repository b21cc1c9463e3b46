"""How long a step takes: every operation by its arithmetic, its memory traffic or its messages, whichever holds it up.

[Note: what overlaps] The host starts operations ahead of the device, so a step takes as long as the slower of the two.
Messages between data-parallel ranks travel while others compute, and show only where they take longer. Those inside a
layer (tensor, context and expert parallelism) are waited for. A pipeline's idle share is that of its schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from plait.config.run import RunConfig
from plait.plan.hardware import Hardware
from plait.plan.traffic import Message, message_of
from plait.precision import make_policy
from plait.spec.phase import Phase
from plait.world import World

_KERNEL_S = 2e-6
"""What a kernel takes on the device however small it is."""
_SUSTAINED = 0.95
"""The share of its best speed that a device keeps up in training."""
_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Timing:
    """Adds up the time of the operations that it sees."""

    def __init__(self, hardware: Hardware, config: RunConfig, world: World) -> None:
        self._hardware = hardware
        self._layout = world.layout
        self._fp32 = "tf32" if make_policy(config.precision).tf32 else "fp32"
        self._watching = True
        self.restart()

    def restart(self) -> None:
        """Forget what was seen so far."""
        self.compute: dict[Phase, float] = defaultdict(float)
        """Seconds on the device, by phase."""
        self.kinds: Counter[str] = Counter()
        """The same, by kind of operation: matmul, attention, memory."""
        self.messages: dict[str, list[Message]] = defaultdict(list)
        """What is sent, by the axes of the layout that it goes along."""
        self.host: float = 0.0
        """Seconds that the host spends on starting operations."""
        self.flops = 0

    def stop(self) -> None:
        """See nothing any more."""
        self._watching = False

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operation was run."""
        if not self._watching:
            return
        message = message_of(func, args, out)
        if message is not None:
            self.messages[message.axis].append(message)
            self.host += self._hardware.launch_us * 1e-6
            return
        if not starts_kernel(func):
            return
        flops, kind = flops_of(func, args, kwargs, out)
        self.add(phase, kind, flops, _moved(func, args, kwargs, out), computes_in(func, args, out))

    def add(self, phase: Phase, kind: str, flops: int, moved: int, dtype: torch.dtype, kernels: int = 1) -> None:
        """Count an operation of so many FLOPs that moves so many bytes."""
        if not self._watching:
            return
        seconds = self.seconds(kind, flops, moved, dtype)
        self.compute[phase] += seconds
        self.kinds[kind] += seconds  # type: ignore[assignment]
        self.host += kernels * self._hardware.launch_us * 1e-6
        self.flops += flops

    def total(self) -> float:
        """Seconds of a step; see [Note: what overlaps]."""
        device = sum(self.compute.values())
        waited = hidden = 0.0
        for messages in self.messages.values():
            for message in messages:
                seconds = message.seconds(self._hardware)
                if message.overlaps:
                    hidden += seconds
                else:
                    waited += seconds
        return max(device + waited, hidden, self.host)

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
        # The edges of a matrix product wait for memory.
        return flops / rate + 0.3 * travel + _KERNEL_S


_FREE = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::detach",
    "aten::_local_scalar_dense",
    "aten::lift_fresh",
    "aten::resize_",
    "aten::set_",
    "aten::_unsafe_view",
    "_c10d_functional::wait_tensor",
}
"""Operations that start nothing on the device."""


def starts_kernel(func: Any) -> bool:
    """Whether an operation starts something on the device."""
    return not func.is_view and func.namespace in ("aten", "prims") and func._schema.name not in _FREE


_LOOKUPS = {torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor, torch.ops.aten.gather.default}
_PRODUCTS = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.matmul: 0,
    torch.ops.aten.linear: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.baddbmm: 1,
}
"""Matrix products, and which argument is the left matrix."""


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, str]:
    """FLOPs of an operation, and its kind; 0 for those that memory holds up."""
    packet = func._overloadpacket
    inner = _PRODUCTS.get(packet)
    if inner is not None:
        return 2 * int(out.numel()) * int(args[inner].shape[-1]), "matmul"
    count = flop_registry.get(packet)
    if count is None:
        return 0, "memory"
    if "attention" in func._schema.name:
        return _attention_flops(func, args), "attention"
    return int(count(*args, **kwargs, out_val=out)), "matmul"


def _attention_flops(func: Any, args: Any) -> int:
    """Two products forward; five back, one of which is made again. Half of it where attention is causal."""
    back = "backward" in func._schema.name
    q, k = (args[1], args[2]) if back else (args[0], args[1])
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    product = 2 * int(q.numel()) * int(k.shape[-2])
    return product * (5 if back else 2) // (2 if named.get("is_causal") or named.get("causal") else 1)


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and writes."""
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    if func in _LOOKUPS:
        return 2 * sum(map(_nbytes, made))  # of a table, only the rows that are asked for
    read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    moved = sum(map(_nbytes, read))
    written = {each.untyped_storage()._cdata for each in read}
    # What is changed in place is read and written; what is new is only written.
    moved += sum(_nbytes(each) for each in made if each.untyped_storage()._cdata not in written)
    if func._schema.is_mutable:
        moved += sum(_nbytes(each) for each in _changed(func, args, kwargs))
    return moved


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found


def computes_in(func: Any, args: Any, out: Any) -> torch.dtype:
    """The format whose speed a product has."""
    inner = _PRODUCTS.get(func._overloadpacket)
    first = (
        args[inner]
        if inner is not None
        else next(iter(t for t in tree_leaves((args, out)) if isinstance(t, Tensor)), None)
    )
    return first.dtype if isinstance(first, Tensor) else torch.float32


def _nbytes(tensor: Tensor) -> int:
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
