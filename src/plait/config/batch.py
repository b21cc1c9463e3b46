"""The batch sum: `total = micro × accumulation × data-parallel size`."""

from __future__ import annotations

from dataclasses import dataclass

from plait.config.train import BatchConfig
from plait.config.words import listed
from plait.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class ResolvedBatch:
    """The three sizes of a batch, which agree with each other and with the data-parallel size."""

    total: int
    micro: int
    accumulation: int

    def split(self, parts: int) -> ResolvedBatch:
        """The same batch in micro-batches that are at most the `parts`-th part as large.

        Raises `ConfigError` where a sample would have to be split.
        """
        if self.micro < parts:
            message = f"memory was short with micro-batches of {max(2 * self.micro // parts, 1)}, and none is smaller"
            remedy = "Write `strategy.recompute: full`, a higher `strategy.zero`, or `strategy.offload`."
            raise ConfigError(Problem("batch.micro", message, remedy))
        own = self.micro * self.accumulation
        micro = next(each for each in range(self.micro // parts, 0, -1) if own % each == 0)
        return ResolvedBatch(self.total, micro, own // micro)


def resolve_batch(batch: BatchConfig, data_parallel_size: int, *, micro_batches: int | None = None) -> ResolvedBatch:
    """The three sizes from those given: two give the third; of one alone, or none, the others are 1 where free.

    `micro_batches`, the pipeline's, is another word for the accumulation. Raises `ConfigError` where the sizes
    contradict each other, or `total` cannot be cut evenly.
    """
    assert data_parallel_size >= 1
    total, micro, accumulation = batch.total, batch.micro, batch.accumulation or micro_batches
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        return ResolvedBatch(micro * accumulation * data_parallel_size, micro, accumulation)
    if micro is not None and accumulation is not None:
        if total != micro * accumulation * data_parallel_size:
            raise _contradiction(total, micro, accumulation, data_parallel_size)
        return ResolvedBatch(total, micro, accumulation)
    known = micro or accumulation or 1
    other, left = divmod(total, known * data_parallel_size)
    if left:
        raise _uneven(total, micro, accumulation, data_parallel_size)
    return ResolvedBatch(total, micro or other, accumulation or (other if micro else 1))


def _contradiction(total: int, micro: int, accumulation: int, ranks: int) -> ConfigError:
    product = micro * accumulation * ranks
    message = (
        f"{total} ≠ {micro} × {accumulation} × {ranks} = {product} (total ≠ micro × accumulation × data-parallel size)"
    )
    ways = [f"total: {product}"]
    if total % (micro * ranks) == 0:
        ways.append(f"accumulation: {total // (micro * ranks)}")
    if total % (accumulation * ranks) == 0:
        ways.append(f"micro: {total // (accumulation * ranks)}")
    return _error(message, ways, "Leave one of the three out, or write")


def _uneven(total: int, micro: int | None, accumulation: int | None, ranks: int) -> ConfigError:
    """`total` is not a multiple of what is known of the right-hand side."""
    known = (micro or accumulation or 1) * ranks
    name, value = ("micro", micro) if micro else ("accumulation", accumulation)
    factors = f"({value} × {ranks})" if value else f"{ranks}"
    words = f"({name} × data-parallel size)" if value else "data-parallel size"
    message = f"{total} ÷ {factors} = {total / known:g}, not a whole number (total ÷ {words})"
    ways = [f"total: {each}" for each in (total // known * known, total // known * known + known) if each]
    if value and total % ranks == 0:
        ways += [f"{name}: {each}" for each in _nearest_divisors(total // ranks, value)]
    return _error(message, ways, "Write")


def _nearest_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above."""
    below = next((each for each in range(min(value, number), 0, -1) if number % each == 0), None)
    above = next((each for each in range(value, number + 1) if number % each == 0), None)
    return [each for each in (below, above) if each]


def _error(message: str, ways: list[str], verb: str) -> ConfigError:
    return ConfigError(Problem("batch", message, f"{verb} {listed([f'`{way}`' for way in ways], 'or')}."))
