"""Random numbers inside tensor-parallel work.

[Note: whose dropout is whose]
Where all ranks of a tensor-parallel group do the same work on whole activations, they must drop the same elements,
so torch's default generator has to be in the same state on all of them: the engine seeds it with a number that
depends on the data a rank sees, not on its place in the group. Where they share the work (heads, hidden features,
parts of the sequence), each needs numbers of its own. There the generator is seeded for the time being from one
draw of the common state and the rank. Nothing is kept between steps: recomputation, which restores the common
state, repeats the same numbers, and a checkpoint needs no more than the default generator's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


def drops(module: nn.Module) -> bool:
    """Whether a module draws random numbers while training: a dropout layer, or a number above 0 of that name."""
    return any(
        ("drop" in key or "jitter" in key or (key == "p" and "Dropout" in type(part).__name__))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
        for part in module.modules()
        for key, value in vars(part).items()
    )


class OwnRandom:
    """Random numbers of this rank's own, from `begin` to `end`. See [Note: whose dropout is whose]."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: tuple[torch.Generator, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """From here on the default generator gives numbers of this rank's own."""
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
            drawn, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)  # so that the next draw is another one; offsets go in fours
        else:
            generator = torch.default_generator
            drawn, offset = int(torch.randint(2**62, (), generator=generator)), 0
        self._common = generator, generator.get_state()
        seeds = np.random.SeedSequence([abs(drawn), offset, self._rank])
        generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))

    def end(self) -> None:
        """From here on the common numbers go on, wherever that is said first."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None

    @contextmanager
    def within(self, device: torch.device) -> Iterator[None]:
        """From `begin` to `end`, also where something goes wrong in between."""
        self.begin(device)
        try:
            yield
        finally:
            self.end()
