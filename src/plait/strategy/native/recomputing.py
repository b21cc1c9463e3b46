"""`recompute: auto`, decided before anything has memory, and said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from plait.optim import is_one_pass
from plait.parallel import Activations, Unit, UnitAccount, Way, find_units
from plait.spec import Note
from plait.strategy.preparation import Preparation

_SAID: dict[Way, str] = {
    "full": "everything",
    "attention": "everything but attention",
    "cheap": "what lies between products",
}


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What a model keeps for its backward pass before it is spread over ranks.

    [Note: counted while it is whole] Layers that are spread send to each other, and a stage of a pipeline is no model
    that a micro-batch could be given to. So it is counted before, and is the most that a rank will keep: of layers that
    `tp` cuts the inside is less, and only one stage has the logits.
    """

    units: Mapping[str, UnitAccount]
    outside: int
    passing: int

    def of(self, units: Sequence[Unit], ranks: int, times: int) -> Activations:
        """What these of its units keep, of rows that `ranks` share, with so many micro-batches under way."""
        none = UnitAccount()
        accounts = [_scaled(self.units.get(unit.name, none), times / ranks) for unit in units]
        return Activations(accounts, outside=self.outside // ranks, passing=self.passing // ranks)


def _scaled(account: UnitAccount, factor: float) -> UnitAccount:
    sizes = {name: int(getattr(account, name) * factor) for name in ("given", "kept", "products", "attention")}
    return replace(account, **sizes)


def count_whole(given: Preparation, module: nn.Module) -> WholeModel | None:
    """What the model keeps, where `recompute: auto` has to know it before the model is spread; else None."""
    config, layout = given.config, given.world.layout
    if config.strategy.recompute.mode != "auto" or layout.pp * layout.ep * layout.cp * layout.tp == 1:
        return None
    from plait.parallel import measure

    units = find_units(module, config.strategy.wrap)
    found = measure(module, units, given.example, config, given.world)
    names = [unit.name for unit in units]
    return WholeModel(dict(zip(names, found.units, strict=True)), found.outside, found.passing)


def choose_ways(
    given: Preparation,
    parts: Sequence[nn.Module],
    all_units: Sequence[Sequence[Unit]],
    *,
    late: bool,
    whole: WholeModel | None,
) -> list[list[Way]]:
    """What each unit of each part computes again.

    `late`: gradients exist from their backward pass to the update only.
    """
    config, world = given.config, given.world
    if config.strategy.recompute.mode != "auto":
        return [[] for _ in parts]
    from plait.parallel import ways_to_recompute

    module = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
    units = [unit for each in all_units for unit in each]
    found = None
    if whole is not None:
        strategy, layout = config.strategy, world.layout
        together = layout.cp * (layout.tp if strategy.tensor.sequence_parallel else 1)
        waits = strategy.pipeline.schedule in ("gpipe", "looped_bfs")  # for all forward passes
        under_way = given.accumulation if waits else min(given.accumulation, layout.pp)
        found = whole.of(units, together, under_way if layout.pp > 1 else 1)
    ways = ways_to_recompute(module, units, given.example, config=config, world=world, late_gradients=late, found=found)
    counts = Counter(ways)
    told = [f"{counts[way]} of {len(ways)} blocks recompute {text}" for way, text in _SAID.items() if counts[way]]
    given.say(Note(f"recompute: auto: {', '.join(told) or 'everything fits, and nothing is recomputed'}"))
    rest = iter(ways)
    return [[next(rest) for _ in each] for each in all_units]


def gradients_come_late(given: Preparation) -> bool:
    """Whether one process keeps each gradient as its backward pass made it; for steps of one micro-batch."""
    config, world, policy = given.config, given.world, given.policy
    if world.layout.size > 1 or config.train.clip_value is not None:
        return False
    return not (policy.mixed and policy.master) or is_one_pass(config.optim, [torch.empty(1, device=world.device)])
