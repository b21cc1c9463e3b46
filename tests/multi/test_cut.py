"""How a batch is cut over ranks and micro-batches changes nothing."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from plait.data import MicroBatch
from tests.multi import nets
from tests.multi.parity import Trace, assert_same, run_steps
from tests.multi.ranks import RankPool

ROWS, STEPS = 12, 2
TRIES = 6


def cut(seed: int, step: int, ranks: int, generator: random.Random) -> list[MicroBatch]:
    """The rows of one step in random pieces, dealt to the ranks in turn; fillers where they do not come out even."""
    batch = nets.rows(1000 * seed + step, ROWS)
    pieces = generator.randint(1, 7)
    edges = sorted([0, ROWS, *generator.sample(range(1, ROWS), pieces - 1)])
    parts = [MicroBatch(nets.take(batch, a, b), b - a) for a, b in pairwise(edges)]
    while len(parts) % ranks:
        parts.append(MicroBatch(nets.take(batch, 0, 1), 0))
    generator.shuffle(parts)
    return parts


def many(rank: int, size: int, runs: list[tuple[dict[str, Any], list[Any]]]) -> list[Trace]:
    return [run_steps(rank, size, sections, steps, nets.Net) for sections, steps in runs]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_gradient_and_weights_do_not_depend_on_the_cut(
    ranks: int, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    whole = [[MicroBatch(nets.rows(1000 * seed + step, ROWS), ROWS)] for step in range(STEPS)]
    expected = run_steps(0, 1, {}, whole, nets.Net)
    strategies: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 2}, {"zero": 3}]
    if ranks == 4:
        strategies.append({"zero": 3, "layout": {"dp_replicate": 2}})
    runs = [
        (
            {"strategy": generator.choice(strategies)},
            [cut(seed, step, ranks, generator) for step in range(STEPS)],
        )
        for _ in range(TRIES)
    ]
    answers = [many(0, 1, runs)] if ranks == 1 else {2: two_ranks, 4: four_ranks}[ranks].run(many, runs)
    for traces in answers:
        for (sections, steps), found in zip(runs, traces, strict=True):
            print(sections, [[b.samples for b in step] for step in steps])
            assert_same(found, expected, tolerance=2e-4)  # squares of differences of sums
