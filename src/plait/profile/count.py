"""Count one step: FLOPs by module, every message (collective, send or receive), and the memory peak by category.

The step runs with real tensors, but slowly, because each operator calls a Python function. So it is not timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.config import Layout
from plait.distributed import replaced, to_local
from plait.engine import Engine, NativeEngine
from plait.launch import Phase
from plait.models import attention
from plait.plan import MemoryRecorder, classify, flops_of, known_tensors, message_of
from plait.profile.marks import ModuleStack, module_marks, uncompiled
from plait.torch_internals import (
    HigherOrderOperator,
    current_autograd_node,
    next_sequence_number,
    schema_of,
    sequence_number,
    tree_leaves,
)

OUTSIDE = "(outside of modules)"


@dataclass(frozen=True, slots=True)
class SentMessage:
    """One collective or send of this rank."""

    op: str
    """The operator, as a trace names it."""
    collective: str
    axis: str
    ranks: int
    bytes: int
    """Bytes of the whole tensor that is gathered, scattered, reduced or exchanged; of a send, of the tensor sent."""
    sent: float
    """Bytes that this rank sends, with a ring algorithm."""
    phase: str


@dataclass(slots=True)
class Flops:
    """The FLOPs of one step."""

    forward: int = 0
    again: int = 0
    """FLOPs of the forward pass that are recomputed in the backward pass."""
    backward: int = 0

    @property
    def total(self) -> int:
        """The FLOPs of all passes."""
        return self.forward + self.again + self.backward


@dataclass(slots=True)
class StepCounts:
    """The FLOPs, messages and memory of one step on one rank."""

    flops: dict[str, Flops] = field(default_factory=lambda: defaultdict(Flops))
    """Module → its FLOPs, without those of its submodules."""
    messages: list[SentMessage] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    """Category → bytes at the peak, as `classify` returns; empty if an engine does not expose its tensors."""
    peak: int = 0


class _OperationCounter:
    """Counts the FLOPs and the messages of every operator."""

    def __init__(self, counted: StepCounts, stack: ModuleStack, layout: Layout) -> None:
        self._counted = counted
        self._stack = stack
        self._layout = layout
        self._attend = attention._compiled_flex_attention
        self._makers: dict[int, str] = {}
        """Sequence number of an autograd node → the module that made it."""

    def saw(self, phase: Phase, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one operator that was run."""
        message = message_of(func, args, out, self._layout)
        if message is not None:
            entry = SentMessage(
                schema_of(func).name,
                message.kind,
                message.axis,
                message.ranks,
                message.bytes,
                message.sent,
                str(phase),
            )
            self._counted.messages.append(entry)
            return
        node = current_autograd_node()
        module = self._stack.innermost
        if node is None:
            # An operator's autograd node is made just before the operator runs, so it has the last sequence number.
            self._makers[next_sequence_number() - 1] = module or OUTSIDE
        flops, _ = flops_of(func, args, kwargs, out)
        if not flops:
            return
        if node is None:
            self._counted.flops[module or OUTSIDE].forward += flops
        elif module is not None:
            self._counted.flops[module].again += flops
        else:
            self._counted.flops[self._makers.get(sequence_number(node), OUTSIDE)].backward += flops

    def flex_attention(self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, enable_gqa: bool) -> Tensor:
        """Replace flex attention: call it, and count its FLOPs without the blocks that the mask skips.

        It is one compiled kernel, whose operators the recorder does not see.
        """
        done = 1.0 - block_mask.sparsity() / 100.0
        product = round(2 * q.numel() * k.shape[-2] * done)
        flops = self._counted.flops[self._stack.innermost or OUTSIDE]
        if current_autograd_node() is None:
            flops.forward += 2 * product
            flops.backward += 5 * product if torch.is_grad_enabled() and q.requires_grad else 0
        else:
            flops.again += 2 * product
        return self._attend(q, k, v, block_mask=block_mask, enable_gqa=enable_gqa)


class _RealRecorder(MemoryRecorder):  # type: ignore[no-untyped-call]
    """The memory recorder of plans, for real tensors."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions inside the model run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)
        if not isinstance(func, HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.hold(tensor, self.current_phase(), sent=False)
        return out

    @contextmanager
    def recording(self) -> Iterator[MemoryRecorder]:
        """Record until the block ends."""
        with self.seeing():
            yield self

    def count_existing(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Count the tensors that exist already."""
        for _, tensor in tensors:
            self.hold(to_local(tensor.detach()), Phase.BUILD, sent=False)


@contextmanager
def count_step(engine: Engine) -> Iterator[StepCounts]:
    """Yield counts, which are filled until the block ends; run one step in it. Nothing runs compiled in it."""
    counted, stack = StepCounts(), ModuleStack()
    watcher = _OperationCounter(counted, stack, engine.world.layout)
    recorder = _RealRecorder(engine.world.device.type, watchers=(watcher,))
    report_phase = engine.on_phase

    def on_phase(phase: Phase) -> None:
        report_phase(phase)
        recorder.enter(phase)

    if isinstance(engine, NativeEngine):
        recorder.count_existing(known_tensors(engine))
        native = engine

        def look(height: int) -> None:
            counted.memory = classify(recorder, native)
            counted.peak = height
            if height > recorder.in_use:  # allocated by a kernel for itself
                counted.memory["kernel workspaces"] = (
                    counted.memory.get("kernel workspaces", 0) + height - recorder.in_use
                )

        recorder.at_height = look
    with (
        uncompiled(engine.model),
        module_marks(engine.model, stack),
        replaced(engine, "on_phase", on_phase),
        replaced(attention, "_compiled_flex_attention", watcher.flex_attention),
        recorder.recording(),
    ):
        yield counted
