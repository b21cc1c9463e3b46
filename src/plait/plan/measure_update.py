"""How fast this host updates offloaded weights."""

from __future__ import annotations

import time

import torch

from plait.ops import AdamNumbers, Crew, adam_step

_NUMBERS = 1 << 24
"""More than caches hold."""
_BYTES = 2 + 2 * 12 + 2
"""Of each: a 16-bit gradient read, weight and moments read and written, a 16-bit weight written."""


def measure_update(cores: int, seconds: float) -> float:
    """GB/s that AdamW reads and writes on the host with so many threads, the best of a few runs."""
    weight, mean, square = (torch.zeros(_NUMBERS) for _ in range(3))
    grad, narrow = (torch.ones(_NUMBERS, dtype=torch.bfloat16) for _ in range(2))
    crew = Crew(cores)
    best, count, end = float("inf"), 0, 0.0
    try:
        while count < 3 or time.perf_counter() < end:
            count += 1
            start = time.perf_counter()
            adam_step(AdamNumbers(count, lr=1e-3), [weight], [grad], [mean], [square], [narrow], crew=crew)
            best = min(best, time.perf_counter() - start)
            end = end or start + seconds
    finally:
        crew.close()
    return _NUMBERS * _BYTES / best / 1e9
