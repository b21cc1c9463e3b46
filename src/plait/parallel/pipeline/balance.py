"""Where to cut: so that the largest stage is as small as can be, or where the user says."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import accumulate, pairwise

from plait.errors import ConfigError, Problem

Bounds = tuple[int, ...]
"""The first layer of each stage, and the number of layers."""


def balance(costs: Sequence[float], stages: int) -> Bounds:
    """Cut a row of layers so that the most expensive stage costs least, and the others are as even as can be.

    Every stage gets a layer at least.
    """
    layers = len(costs)
    if layers < stages:
        raise ConfigError(
            Problem(
                "strategy.layout.pp",
                f"{stages} pipeline stages, but the model has {layers} layers to share out",
                f"Use at most {layers} stages (ranks × stages_per_rank).",
            )
        )
    before = [0.0, *accumulate(costs)]
    # best[n]: the cheapest way to cut the first n layers into the stages so far; where two have the same most
    # expensive stage, the one with the smaller sum of squares.
    best: list[tuple[float, float, Bounds] | None] = [(before[n], before[n] ** 2, (0, n)) for n in range(layers + 1)]
    best[0] = None
    for stage in range(1, stages):
        following: list[tuple[float, float, Bounds] | None] = [None] * (layers + 1)
        for end in range(stage + 1, layers + 1):
            for start in range(end - 1, stage - 1, -1):
                known = best[start]
                cost = before[end] - before[start]
                found = following[end]
                if found is not None and cost > found[0]:
                    break  # a longer stage costs more still
                if known is None:
                    continue
                offer = (max(known[0], cost), known[1] + cost**2)
                if found is None or offer < found[:2]:
                    following[end] = (*offer, (*known[2], end))
        best = following
    chosen = best[layers]
    assert chosen is not None
    return chosen[2]


def cut_at(names: Sequence[str], layers: Sequence[str], stages: int) -> Bounds:
    """Cut before the named layers, one for each stage but the first; the very first layer may be named too."""
    key = "strategy.pipeline.split"
    problems = []
    found: list[int] = []
    for name in names:
        matches = [index for index, layer in enumerate(layers) if layer == name or layer.endswith(f".{name}")]
        if len(matches) == 1:
            found.append(matches[0])
            continue
        close = difflib.get_close_matches(name, layers, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        what = f"several layers are called {name!r}" if matches else f"{name!r} is no layer of the model"
        problems.append(Problem(key, what, f"{hint}there are: {_listed(layers)}"))
    if problems:
        raise ConfigError(problems)
    starts = found if found[:1] == [0] else [0, *found]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(Problem(key, f"{list(names)} is not in the order of the layers", f"It is {_listed(layers)}."))
    if len(starts) != stages:
        raise ConfigError(
            Problem(
                key,
                f"{list(names)} cuts the layers into {len(starts)} stages, but there are {stages}",
                f"Name {stages - 1} layers, the first of each stage but the first stage.",
            )
        )
    return (*starts, len(layers))


def _listed(layers: Sequence[str]) -> str:
    return ", ".join(layers) if len(layers) <= 12 else f"{', '.join(layers[:4])}, … {', '.join(layers[-2:])}"
