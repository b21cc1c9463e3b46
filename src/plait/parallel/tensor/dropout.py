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


def shared_seed(seed: int, *, rank: int, tensor_size: int) -> tuple[int, int]:
    """What `world.seed_everything(*…)` is to be called with: (seed, number of the group this rank is in).

    The tensor axis is the innermost of the mesh, so its groups are runs of `tensor_size` neighbouring ranks.
    """
    return seed, rank // tensor_size


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


@contextmanager
def own_random(rank: int, device: torch.device) -> Iterator[None]:
    """Random numbers of this rank's own, until the end of the block. See [Note: whose dropout is whose]."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        offset = generator.get_offset()
        drawn = (generator.initial_seed(), offset)
        generator.set_offset(offset + 4)  # so that the next draw is another one; offsets go in fours
    else:
        generator = torch.default_generator
        drawn = (int(torch.randint(2**62, (), generator=generator)), 0)
    common = generator.get_state()
    entropy = [abs(drawn[0]), drawn[1], rank]
    generator.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
    try:
        yield
    finally:
        generator.set_state(common)
