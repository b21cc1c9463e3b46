"""Which examples belong to which phase, and which of those are for validation.

Examples with the same prompt stay together, so that nothing is validated on a prompt that was trained on, and no two
phases share one. The order of prompts is a hash of their text: it depends on neither seed nor file order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from plait.config import split_shares
from plait.errors import DataError
from plait.posttrain.data.records import Example

PLACES = {"sft": 0, "reward": 1, "dpo": 1, "ppo": 2, "grpo": 2}
"""Which of the three shares a phase takes."""


def split(
    examples: Sequence[Example], phase: str, *, data_split: tuple[int, ...] | str | None, val_fraction: float
) -> tuple[list[Example], list[Example]]:
    """The examples of a phase: for training, for validation."""
    prompts = sorted({example.prompt_text for example in examples}, key=_hash)
    shares, place = split_shares(data_split), PLACES[phase]
    if sum(shares):
        bounds = [round(len(prompts) * sum(shares[:at]) / sum(shares)) for at in range(4)]
        prompts = prompts[bounds[place] : bounds[place + 1]]
        if not prompts:
            raise DataError(
                f"posttrain.data_split {data_split!r} leaves nothing for {phase}: share {place + 1} of three is empty"
            )
    held = min(round(len(prompts) * val_fraction), len(prompts) - 1) if len(prompts) > 1 else 0
    if val_fraction > 0 and held == 0 and len(prompts) > 1:
        held = 1
    kept, validating = set(prompts[held:]), set(prompts[:held])
    train = [example for example in examples if example.prompt_text in kept]
    return train, [example for example in examples if example.prompt_text in validating]


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
