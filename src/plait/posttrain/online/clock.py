"""Where the time of an online phase goes: writing answers, judging them, asking models about them, learning."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PARTS = ("writing", "judging", "asking", "learning")


class Clock:
    """Seconds of each part, and the tokens of all answers, summed up since the run began."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.tokens = 0

    @contextmanager
    def count(self, part: str) -> Iterator[None]:
        """What happens inside belongs to this part."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - begun

    def __str__(self) -> str:
        whole = sum(self.seconds.values()) or 1.0
        shares = (f"{part} {seconds:.1f} s ({seconds / whole:.0%})" for part, seconds in self.seconds.items())
        rate = self.tokens / (self.seconds["writing"] or 1.0)
        return f"where the time went: {', '.join(shares)}; answers were written at {rate:,.0f} tokens/s"
