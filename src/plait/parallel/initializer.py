"""What gives a model its first values, when it was built without any.

[Note: when a model may be built without values]
On the meta device a constructor runs, but its numbers are lost. So a model may be built there only if something
else makes such numbers again, module by module. That is, in this order:
- its own `init_weights(module)`, if it fills every tensor;
- what its constructor did, done again ([Note: the constructor is the initializer], `replay.py`), and after that its
  `init_weights(module)`, if it has one;
- of a model that came as an object, whose constructor nobody watched: each module's `reset_parameters`.
`init_weights` is left out where it would lose something: where the constructor wrote tensors into what it fills, or
wrote over what it had written, as those do that give some weights another deviation at the end. Where nothing of this
can be done, or the model has something that would stay behind on the meta device (a gradient hook, a tensor that is no
parameter and no buffer: `why_not_on_meta`), the model is built for real.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plait.parallel.attachments import why_not_on_meta
from plait.parallel.recording import Record, Step
from plait.parallel.replay import direct_tensors, find_replay

Initializer = Callable[[nn.Module], None]
Writes = list[tuple[Tensor, list[Step]]]
"""Tensors of a model, and what wrote into each."""


@dataclass(frozen=True, slots=True)
class InTurn:
    """Two initializers of one model, the second after the first."""

    first: Initializer
    second: Initializer

    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters and buffers of one module."""
        self.first(module)
        self.second(module)


def find_initializer(model: nn.Module, built: Record | None = None) -> Initializer | None:
    """What sets the values of one module of a model on the meta device, or None where it must be built for real.

    `built` is the record of the model's construction; without it the model's own word has to do.
    See [Note: when a model may be built without values].
    """
    if not all(tensor.is_meta for tensor in _tensors(model)) or why_not_on_meta(model) is not None:
        return None
    declared = _declared(model)
    if built is None:
        # Many write `init_weights` for the modules they care about, and leave the rest as torch makes them.
        possible = (_reset,) if declared is None else (declared, InTurn(_reset, declared))
        return next((each for each in possible if _fills(_writes(model, each))), None)
    # Both are asked before `init_weights` is tried, which may exchange storages.
    replay, before = find_replay(model, built), {id(tensor): built.writes_to(tensor) for tensor in _tensors(model)}
    writes = None if declared is None else _writes(model, declared)
    if declared is None or writes is None or any(_loses(before[id(tensor)], made) for tensor, made in writes):
        return replay
    if _fills(writes):
        return declared
    return None if replay is None else InTurn(replay, declared)


def _declared(model: nn.Module) -> Initializer | None:
    declared = getattr(model, "init_weights", None)
    if declared is None:
        return None
    required = [p for p in inspect.signature(declared).parameters.values() if p.default is p.empty]
    takes_a_module = len(required) == 1 or "module" in inspect.signature(declared).parameters
    return declared if takes_a_module else None


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _writes(model: nn.Module, initializer: Initializer) -> Writes | None:
    """What an initializer does to each tensor, of the first module that has it; None where it fails."""
    found: Writes = []
    seen: set[int] = set()
    for module in model.modules():
        own = [tensor for tensor in direct_tensors(module).values() if id(tensor) not in seen]
        if not own:
            continue
        seen.update(id(tensor) for tensor in own)
        try:
            with torch.no_grad(), Record() as record:
                initializer(module)
        except Exception:  # it looks at values, or means something else by its argument
            return None
        found += [(tensor, record.writes_to(tensor)) for tensor in own]
    return found


def _fills(writes: Writes | None) -> bool:
    return writes is not None and all(made for _, made in writes)


def _loses(before: list[Step], made: list[Step]) -> bool:
    """Whether something that a constructor wrote is lost where an initializer writes instead."""
    if not made:
        return False
    from_tensors = any(read.storage != into.storage for step in before for read in step.read for into in step.written)
    starts = range(len(before) - len(made) + 1)
    same = [all(a.does_as(b) for a, b in zip(before[start:], made, strict=False)) for start in starts]
    return from_tensors or (any(same) and not same[-1])


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
