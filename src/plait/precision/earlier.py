"""The largest numbers of the last steps, kept for all layers that multiply in 8 bits, and the scales they lead to.

[Note: what is kept of a step] See [Note: scales of earlier steps] in `ops.fp8_earlier`. A step's notes are combined
over the ranks that saw other data, all layers in one message, so that scales are the same everywhere, and are what one
process would have. What was not finite is left out; beside that a skipped step counts as any other, so nobody need ask
whether it was skipped. Until there are as many steps as are looked back at, scales are found at once: numbers change
most in the beginning, and a first step may have gradients of zero. A run that goes on without such a state, or with
that of other layers, starts in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.fake_tensors import is_like, on_fake_tensors
from plait.ops import AT_ONCE, FORMATS, Earlier


class EarlierScales:
    """What some layers know from the last steps: for each kind of tensor and each layer, the largest numbers."""

    def __init__(self, names: Sequence[str], *, history: int, headroom: float, device: torch.device) -> None:
        """`names` are those of the layers; numbers may grow by `headroom` before they are cut."""
        self._names = list(names)
        self._headroom = headroom
        shape = len(FORMATS), len(self._names)
        self._history = torch.zeros(history, *shape, device=device)
        self._notes = torch.zeros(shape, dtype=torch.int32, device=device)
        limits = [[torch.finfo(dtype).max] for dtype in FORMATS]
        self._limits = torch.tensor(limits, device=device)
        self._steps = _steps_seen(self._history)
        self._peaks = self._reckon()

    def of(self, rows: Sequence[int], x: Tensor) -> Earlier:
        """What is known of the layers with these numbers, for a pass of training over `x`."""
        first, count = rows[0], len(rows)
        # Layers of one module are neighbours here; for others, and for a count of activations, there is no view.
        if list(rows) != list(range(first, first + count)) or not is_like(x, self._notes):
            return AT_ONCE
        peaks = self._peaks if self._steps == len(self._history) else None
        whole = Earlier(peaks, self._notes if torch.is_grad_enabled() else None)
        return whole.part(first, first + count)

    @torch.no_grad()
    def after_step(self, group: dist.ProcessGroup | None) -> None:
        """Take a step's notes in; `group`: the ranks that saw other data. The device is not waited for."""
        seen = self._notes.view(torch.float32)
        seen = seen.where(seen.isfinite(), 0.0)
        if group is not None:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        self._notes.zero_()
        self._history = torch.cat((self._history[1:], seen[None]))
        self._peaks = self._reckon()
        self._steps = min(self._steps + 1, len(self._history))

    def _reckon(self) -> Tensor:
        """What scales are made for. A layer of which nothing is known has a scale of one.

        Always a new tensor: a backward pass wants the scales of its own forward pass.
        """
        largest = self._history.amax(0)
        return torch.where(largest > 0, largest * self._headroom, self._limits)

    def state(self) -> dict[str, list[list[float]]]:
        """For each layer and kind, the largest numbers of the last steps, the latest one last."""
        known = self._history[len(self._history) - self._steps :].permute(2, 1, 0).tolist()
        return dict(zip(self._names, known, strict=True))

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Go on from `state`, whichever layers and however many steps it has."""
        history = torch.zeros(self._history.shape)
        length, steps = len(history), len(history)
        for column, name in enumerate(self._names):
            kinds = state.get(name, [[]])
            count = min(length, min(map(len, kinds)))
            steps = min(steps, count)
            if count:
                history[-count:, :, column] = torch.tensor([kind[-count:] for kind in kinds]).t()
        self._history, self._steps = history.to(self._history.device), steps
        self._notes.zero_()
        self._peaks = self._reckon()


@on_fake_tensors(lambda history: len(history))  # a plan is about the steps that come after the first ones
def _steps_seen(history: Tensor) -> int:
    return 0
