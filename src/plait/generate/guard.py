"""Is what writes the same as what is trained? Both are asked for the log-probabilities of the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plait.distributed import is_sharded
from plait.engine import ManualEngine
from plait.errors import GenerateError, RolloutMismatchError
from plait.generate.decoder import filled_up, padded
from plait.generate.options import Completion

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Mean difference of log-probabilities that rounding explains, by the format that is computed in."""
WORST = 25.0
"""A single token may differ by so many times the tolerance."""


class Comparison(NamedTuple):
    """How far apart the log-probabilities are, over all tokens of all ranks."""

    mean: float
    worst: float
    tokens: int
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains it. A difference that is no number does not agree."""
        return self.mean <= self.tolerance and self.worst <= WORST * self.tolerance

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.tokens} tokens differ by {self.mean:.2g} in the mean and {self.worst:.2g} at "
            f"most; {self.tolerance:.2g} and {WORST * self.tolerance:.2g} are allowed"
        )


def trainer_logprobs(
    engine: ManualEngine,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    cuts: int = 1,
) -> list[list[float]]:
    """What the trainer's own forward pass says to tokens that are given.

    In evaluation mode, without gradients. Ranks that share a model must all call it, each with its own rows. `cuts` is
    how many of them take a part of each row, where the sequence is split.
    """
    rows = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)]
    ids = filled_up(padded(rows, engine.world.device), cuts)
    training = engine.model.training
    engine.model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = engine.forward(input_ids=ids)
    finally:
        engine.model.train(training)
    if is_sharded(logits):
        logits = logits.full_tensor()
    found = []
    for row, prompt, completion in zip(logits, prompts, completions, strict=True):
        first, count = len(prompt) - 1, len(completion.tokens)
        own = row[first : first + count].float().log_softmax(-1)
        tokens = torch.tensor(completion.tokens, device=own.device)[:, None]
        found.append([float(value) for value in own.gather(1, tokens).squeeze(1).tolist()])
    return found


def compare_logprobs(
    engine: ManualEngine,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    tolerance: float,
    rows: int = 8,
    cuts: int = 1,
) -> Comparison:
    """Compare answers with the trainer's own forward pass. Every rank must call it, with the same answers.

    Each data-parallel rank looks at its share of them, `rows` at a time.
    """
    if not completions:
        raise GenerateError("there are no answers to compare: generate some first")
    world = engine.world
    parts = world.layout.data_parallel
    share = range(world.data_rank, len(completions), parts)
    differences: list[float] = []
    for turn in range(-(-len(completions) // parts // rows) or 1):
        chosen = list(share[turn * rows : (turn + 1) * rows]) or [0]  # a rank without work helps the others
        asked, given = [prompts[i] for i in chosen], [completions[i] for i in chosen]
        for theirs, ours in zip(trainer_logprobs(engine, asked, given, cuts=cuts), given, strict=True):
            if share[turn * rows :] and world.coordinate("tp") == 0:  # the others along `tp` say the same
                differences += [abs(a - b) for a, b in zip(theirs, ours.logprobs, strict=True)]
    every = [value for part in world.gather(differences) for value in part]
    # `max` would lose what is no number, depending on where it stands.
    spread = torch.tensor(every, dtype=torch.float64)
    return Comparison(float(spread.mean()), float(spread.max()), len(every), tolerance)


def require_agreement(comparison: Comparison) -> None:
    """Raise where the two do not agree."""
    if not comparison.agrees:
        raise RolloutMismatchError(
            f"what writes the answers is not the policy that is trained: {comparison}. Write with the trainer itself "
            "(mode: trainer, or on_mismatch: fallback), or raise the tolerance if rounding is that coarse here"
        )
