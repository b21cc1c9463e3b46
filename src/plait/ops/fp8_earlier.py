"""Scales that come from earlier steps, so that a tensor is read once.

[Note: scales of earlier steps] To find a tensor's own scale takes a reading, before the one that rounds. But from one
step to the next, the largest number of a layer's input, weight or gradient changes little. So a scale may be made from
the largest numbers of a few steps before, with some room above; what is beyond that all the same is cut to the range.
The kernel that rounds notes the largest number in passing. `precision.earlier` keeps the notes, and makes the peaks of
the next step from them. Within a step peaks do not change: micro-batches, and a forward pass that is computed again,
have the same scales, and a note that is taken twice is the same note.

Every layer has notes of its own. Layers that are computed together share the largest of their peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.ops.fp8_cast import E4M3, E5M2, Cast, cast, peaks_of

INPUT, WEIGHT, GRADIENT = range(3)
"""The kinds of tensors that a layer multiplies."""
FORMATS: tuple[torch.dtype, ...] = (E4M3, E4M3, E5M2)
"""Of each kind."""


class Earlier(NamedTuple):
    """What is known of the tensors of some layers, and where to note what is seen: a row a kind, a column a layer."""

    peaks: Tensor | None = None
    """Numbers that scales are made for, fp32; where there are none, scales are found at once."""
    notes: Tensor | None = None
    """The bits of the largest numbers of this step, int32; where there are none, nothing is noted."""

    @property
    def saturates(self) -> bool:
        """Whether a tensor may have larger numbers than its scale is made for."""
        return self.peaks is not None

    def part(self, start: int, stop: int) -> Earlier:
        """The same for some of the layers."""
        peaks, notes = (None if each is None else each[:, start:stop] for each in self)
        return Earlier(peaks, notes)

    def notes_of(self, kind: int) -> Tensor | None:
        """Where the largest numbers of this kind are noted."""
        return None if self.notes is None else self.notes[kind]

    def peaks_of(self, kind: int, tensors: Sequence[Tensor]) -> Tensor:
        """Numbers the largest of which is what the scale of these tensors is made for."""
        return peaks_of(tensors) if self.peaks is None else self.peaks[kind]

    def cast(
        self, kind: int, tensors: Sequence[Tensor], peaks: Tensor, *, dim: int = 0, rows: bool, columns: bool
    ) -> Cast:
        """`fp8_cast.cast` in the format of the kind, noting what it sees."""
        return cast(
            tensors,
            peaks,
            FORMATS[kind],
            dim=dim,
            rows=rows,
            columns=columns,
            notes=self.notes_of(kind),
            saturates=self.saturates,
        )


AT_ONCE = Earlier()
"""Every tensor's scale is its own."""
