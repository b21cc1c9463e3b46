"""What a model says to many rows, however it is spread: each rank asks for its share, and all know all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.spec import MicroBatch
from plait.strategy import NativeEngine


def ask(
    engine: NativeEngine,
    lengths: Tensor,
    inputs: Callable[[Sequence[int]], Mapping[str, Tensor]],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    rows: int,
) -> dict[str, Tensor]:
    """Outputs of a model for rows of these lengths, by name; `wanted` says which, and what a row's one is shaped like.

    Without gradients and in evaluation mode. `inputs` makes a micro-batch of some of the rows, `rows` at a time; what
    is wider than the micro-batch was stays zero. Every rank must ask for the same.
    """
    world, count = engine.world, len(lengths)
    found = {name: torch.zeros(count, *shape) for name, shape in wanted.items()}
    parts = world.layout.data_parallel
    order = lengths.argsort(stable=True).tolist()  # rows of about the same length go together
    share = order[world.data_rank :: parts]
    for first in range(0, len(order[::parts]), rows):
        mine = share[first : first + rows]
        chosen = mine or order[:1]  # a rank without work helps those who share the model with it
        said = engine.evaluate_micro_batch(MicroBatch(inputs(chosen), len(mine))).outputs
        if said is None:  # others along `tp` say the same
            continue
        for name, whole in found.items():
            for row, values in zip(mine, said[name].float().cpu(), strict=False):
                if values.ndim:
                    whole[row, : len(values)] = values
                else:
                    whole[row] = values
    if world.everyone is not None:
        for whole in found.values():
            box = whole.to(world.device)
            dist.all_reduce(box, group=world.everyone)
            whole.copy_(box)
    return found
