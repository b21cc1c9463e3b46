"""Held-out prompts, answered by the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.generate import Sampling
from plait.posttrain.data.prompts import Prompt
from plait.posttrain.online.writing import Writer


def measure(writer: Writer, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, float]:
    """Mean reward, accuracy where the data can be checked, and mean length. The same on every rank."""
    greedy = replace(sampling, temperature=0.0, top_k=None, top_p=None)
    written = writer.write(prompts, greedy, range(len(prompts)))
    known = written.rewards[written.rewards.isfinite()].double()
    found = {
        "reward": float(known.mean()) if len(known) else float("nan"),
        "length": sum(len(tokens) for tokens in written.tokens) / len(prompts),
        "skipped_answers": float(len(prompts) - len(known)),
    }
    accuracy = writer.accuracy(written.answers)
    return found if accuracy is None else {**found, "accuracy": accuracy}
