"""A check before the first step: tokens influence only those that may see them.

Layers are asked what they do before training starts. This check guards what could not be asked: it evaluates the model
on one short row made of the first batch's tokens, changes the row where that must not matter, and compares losses.
Where rows have document ids, changed documents must not move the loss of another one. Where rows are split over ranks,
the loss of some tokens must not depend on where the row is cut, nor on what comes after them.

It takes a few forward passes without gradients in evaluation mode, and changes neither weights nor random states.

[Note: how much a loss may move] Rounding differs where experts get other tokens beside those that are compared, or
where attention is computed in other parts. In fp32 that is far less than what the check is for. With fewer bits it is
not, so there a difference counts in proportion to an effect that is allowed: that of a changed earlier token of the
same document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.data import IGNORE, MicroBatch
from plait.distributed import restore_rng_state, rng_state
from plait.engine import Engine
from plait.errors import ModelError

LONGEST = 384
"""Tokens of the row that is evaluated, unless more are needed for 8 in each chunk of a rank."""
_SHORTEST = 24
_DRAWS = 3
"""How often a difference is looked for with other tokens, before it is an error: a router may be undecided."""
_ROW_KEYS = frozenset({"input_ids", "labels", "positions", "position_ids", "document_ids"})

_EXACT = 5e-6
"""The largest difference, relative to the loss, of equal sums in fp32."""
_SHARE = 0.2
"""The largest difference in other dtypes, as a share of an allowed effect; see [Note: how much a loss may move]."""


def check_rows(engine: Engine, batch: Any) -> None:
    """Raise a `ModelError` if tokens of `batch` influence others that must not see them. Every rank must call it.

    Nothing is checked for batches other than token rows with document ids, or split over ranks, nor for experts with a
    capacity, which all tokens of a row share.
    """
    inputs = batch.inputs if isinstance(batch, MicroBatch) else batch
    world = engine.world
    split = world.layout.cp > 1
    if not all(world.gather(_is_checked(engine.model, inputs, split=split))):
        return
    state = rng_state(world.device)
    try:
        with torch.compiler.set_stance("force_eager"):
            probe = _Probe(engine, inputs)
            if "document_ids" in inputs:
                _check_documents(probe)
            if split and world.layout.pp == 1:  # pipeline stages take rows of one length
                _check_cuts(probe)
    finally:
        restore_rng_state(state, world.device)


def _is_checked(model: nn.Module, inputs: Any, *, split: bool) -> bool:
    if not isinstance(inputs, Mapping) or not {"input_ids", "labels"} <= inputs.keys() <= _ROW_KEYS:
        return False
    rows = inputs["input_ids"]
    shaped = all(isinstance(x, Tensor) and x.shape == rows.shape for x in inputs.values())
    if not shaped or rows.ndim != 2 or rows.shape[1] < _SHORTEST or rows.is_floating_point():
        return False
    limited = any(getattr(module, "capacity_factor", None) is not None for module in model.modules())
    return (split or "document_ids" in inputs) and not limited


class _Probe:
    """Evaluates one row, some of whose tokens are changed."""

    def __init__(self, engine: Engine, inputs: Mapping[str, Tensor]) -> None:
        self.engine = engine
        layout, rows = engine.world.layout, inputs["input_ids"]
        self.chunks = layout.cp * (1 if engine.config.strategy.context.kind == "ulysses" else 2)
        length = max(LONGEST, 8 * self.chunks if layout.cp > 1 else 0)
        self.rows = rows.clone() if layout.pp > 1 else rows[:1, :length].clone()
        self.keys = inputs.keys()
        self.tokens = self.rows.shape[1]
        self.values = torch.tensor(sorted(set(self.rows.flatten().tolist())), device=rows.device)
        if len(self.values) == 1:
            self.values = torch.cat([self.values, (self.values - 1).abs()])
        self.share = 0.0 if engine.config.precision.compute == "fp32" else _SHARE

    def loss(
        self,
        counted: slice,
        changed: Sequence[slice] = (),
        *,
        bounds: Sequence[int] = (0,),
        draw: int = 0,
        end: int = 0,
    ) -> float:
        """Return the loss of the tokens in `counted`, summed over all ranks, with other tokens in `changed`.

        `bounds` are the first tokens of the row's documents; the row ends before token `end` if that is given.
        """
        rows = self.rows.clone()
        for span in changed:
            index = torch.searchsorted(self.values, rows[:, span].contiguous())
            rows[:, span] = self.values[(index + draw + 1) % len(self.values)]
        labels = torch.full_like(rows, IGNORE)
        labels[:, counted] = self.rows[:, counted].roll(-1, 1)
        columns = torch.arange(self.tokens)
        ids = (columns[:, None] >= torch.tensor(bounds)).sum(1) - 1
        positions = columns - torch.tensor(bounds)[ids]
        fields = {"input_ids": rows, "labels": labels, "document_ids": ids}
        fields |= {"positions": positions, "position_ids": positions}
        cut = slice(None, end or None)
        given = {key: fields[key].to(rows.device).expand(rows.shape)[:, cut].contiguous() for key in self.keys}
        evaluation = self.engine.evaluate_micro_batch(MicroBatch(given, len(rows)))
        total = sum(self.engine.world.gather(evaluation.loss_sum))
        return total if math.isfinite(total) else 0.0  # other checks report a loss that is not finite

    def may_move(self, base: float, moved: float, counted: slice, changed: slice, **how: Any) -> bool:
        """Whether a loss that was `base` may have become `moved`, given the effect of allowed changes on `counted`."""
        if abs(moved - base) <= _EXACT * abs(base) or not self.share:
            return abs(moved - base) <= _EXACT * abs(base)
        effect = abs(self.loss(counted, (changed,), **how) - self.loss(counted, **how))
        return abs(moved - base) <= self.share * effect


def _check_documents(probe: _Probe) -> None:
    """Raise a `ModelError` if the document in the middle of a row sees those before and after it."""
    third = probe.tokens // 3
    bounds = (0, third, 2 * third)
    counted, others = slice(third, third + 8), (slice(0, third), slice(2 * third, None))
    base = moved = probe.loss(counted, bounds=bounds)
    for draw in range(_DRAWS):
        moved = probe.loss(counted, others, bounds=bounds, draw=draw)
        if probe.may_move(base, moved, slice(third + 1, third + 9), slice(third, third + 1), bounds=bounds, draw=draw):
            return
    layer = _first_layer(probe, counted, others, bounds)
    raise ModelError(
        f"{layer} of {_name(probe.engine.model)} sees tokens of other documents: changing the documents before and "
        f"after one in the same row moved its loss from {base:.6g} to {moved:.6g}; set data.document_mask: false "
        "(sft.packing: false for fine-tuning), or train.check_rows: false if that is meant"
    )


def _check_cuts(probe: _Probe) -> None:
    """Raise a `ModelError` if it matters where a row is cut for its ranks, or what comes after some tokens."""
    end = 3 * probe.tokens // 4  # the shorter row is cut elsewhere
    first = -(-probe.tokens // probe.chunks)
    if first == -(-end // probe.chunks):
        return
    counted = slice(first, first + 4)
    base = moved = 0.0
    for draw in range(_DRAWS):
        base = probe.loss(counted, (slice(0, 1),), draw=draw)
        moved = probe.loss(counted, (slice(0, 1),), draw=draw, end=end)
        if probe.may_move(base, moved, counted, slice(first - 3, first), draw=draw, end=end):
            return
    raise ModelError(
        f"a layer of {_name(probe.engine.model)} does not see the full row where rows are split over ranks: the loss "
        f"of tokens after such a cut is {base:.6g}, and {moved:.6g} where the row is cut elsewhere; set "
        "strategy.layout.cp: 1, or train.check_rows: false if that is meant"
    )


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _first_layer(probe: _Probe, counted: slice, changed: Sequence[slice], bounds: Sequence[int]) -> str:
    """Return the name of the first repeated layer whose output for the counted tokens depends on the changed ones."""
    with _outputs(probe, counted) as first:
        probe.loss(counted, bounds=bounds)
    with _outputs(probe, counted) as second:
        probe.loss(counted, changed, bounds=bounds)
    for name, output in first.items():
        if name in second and not torch.allclose(
            output, second[name], rtol=1e-3, atol=1e-3 * float(output.abs().max())
        ):
            return name
    return "a layer"


@contextmanager
def _outputs(probe: _Probe, counted: slice) -> Iterator[dict[str, Tensor]]:
    """Return a context in which the outputs of repeated layers for the counted tokens are recorded, by name."""
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple | list) else output
            if isinstance(output, Tensor) and output.ndim == 3 and output.shape[1] == probe.tokens:
                outputs[name] = output[:, counted].detach().clone()

        return hook

    listed = [
        (f"{path}.{name}" if path else name, child)
        for path, module in probe.engine.model.named_modules()
        if isinstance(module, nn.ModuleList)
        for name, child in module.named_children()
    ]
    handles = [child.register_forward_hook(record(name)) for name, child in listed]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
