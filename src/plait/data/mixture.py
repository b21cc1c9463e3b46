"""A mixture of several datasets, the sources: each provides a fixed number of samples per epoch, its share.

[Note: shares of an epoch]
The positions of an epoch are assigned to the sources, a contiguous range to each; the sample order, which shuffles
positions, mixes them. A source with fewer samples than its share is repeated, one with more continues in the next epoch
where it stopped: a sample is repeated only after all others of its source. So the mixture is a pure function of (seed,
epoch, position) as well, and resuming costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from plait.data.loader import set_epoch
from plait.data.order import SampleOrder
from plait.errors import DataError


class MixtureSource(Dataset[Any]):
    """A dataset with `samples` per epoch, of each source in proportion to its weight: [Note: shares of an epoch]."""

    def __init__(
        self,
        sources: Sequence[Any],
        weights: Sequence[float] = (),
        samples: int | None = None,
        *,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """Without `weights`, shares are proportional to the sources' lengths. `shuffle`: shuffle within each source."""
        for source in sources:
            if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
                raise DataError(f"{type(source).__name__} is a stream, which cannot be a source of a mixture")
        lengths = [len(source) for source in sources]
        self.sources = list(sources)
        self.counts = _deal(samples or sum(lengths), weights or lengths)
        self._cumulative = list(accumulate(self.counts))
        self._orders = [SampleOrder(length, seed + locate, shuffle) for locate, length in enumerate(lengths)]
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the samples of this epoch, in the sources too."""
        self._epoch = epoch
        for source in self.sources:
            set_epoch(source, epoch)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the source of the sample at a position of the epoch, and its index there."""
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        source = bisect_right(self._cumulative, position)
        count, order = self.counts[source], self._orders[source]
        taken = self._epoch * count + position - (self._cumulative[source] - count)
        return source, order.index(*divmod(taken, order.length))

    def __len__(self) -> int:
        return self._cumulative[-1]

    def __getitem__(self, position: int) -> Any:
        source, index = self.locate(position)
        return self.sources[source][index]

    @property
    def seq_len(self) -> int:
        """The sequence length of the sources."""
        return int(self._first("seq_len"))

    @property
    def vocab_size(self) -> int:
        """The largest vocabulary size of the sources."""
        self._first("vocab_size")
        return max(int(source.vocab_size) for source in self.sources if hasattr(source, "vocab_size"))

    @property
    def tokenizer_digest(self) -> str:
        """The digest of the tokenizer that text sources share."""
        return str(self._first("tokenizer_digest"))

    def _first(self, name: str) -> Any:
        for source in self.sources:
            if hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(name)


def _deal(samples: int, weights: Sequence[float]) -> list[int]:
    """Return integer shares that sum to `samples`, proportional to the weights (largest remainder method)."""
    exact = [samples * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_loss[: samples - sum(counts)]:
        counts[index] += 1
    return counts
