"""The batch triad: `train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks`."""

from __future__ import annotations

from plait.config import listed
from plait.frontends.deepspeed.config.keys import only, to
from plait.frontends.deepspeed.config.kinds import COUNT, FLAG
from plait.frontends.deepspeed.config.parallel import ranks_of_one_sample
from plait.frontends.deepspeed.config.work import Table, Work

TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_OPEN = "left open: it follows from the other two and the number of ranks, or is 1"

TABLE: Table = {
    TOTAL: to("batch.total", COUNT, if_open=_OPEN),
    MICRO: to("batch.micro", COUNT, if_open=_OPEN),
    ACCUMULATION: to("batch.accumulation", COUNT, if_open=_OPEN),
    "managed_gradient_accumulation": only(
        True,
        FLAG,
        "micro-batches are counted here too",
        "a step always ends after `gradient_accumulation_steps` micro-batches: leave it out",
    ),
}


def check(work: Work) -> None:
    """Find sizes that cannot be made to agree, whatever comes later."""
    sizes = {name: work.look(name) for name in (TOTAL, MICRO, ACCUMULATION)}
    if not all(value is None or COUNT.has(value) for value in sizes.values()) or sizes[TOTAL] is None:
        return
    factors = [name for name in (MICRO, ACCUMULATION) if sizes[name] is not None]
    product = 1
    for name in factors:
        product *= int(sizes[name])
    ranks = None if work.world_size is None else max(1, work.world_size // ranks_of_one_sample(work))
    total = int(sizes[TOTAL])
    words = [f"{name} {int(sizes[name])}" for name in factors]
    if ranks is not None:
        words.append(f"{ranks} data-parallel rank{'' if ranks == 1 else 's'}")
    product *= ranks or 1
    exact = ranks is not None and len(factors) == 2
    if total != product if exact else total % product:
        verb = "is not" if exact else "is no multiple of"
        sum_ = " × ".join(words) + (f" = {product}" if len(words) > 1 else "")
        remedy = f"Leave out one of {listed([TOTAL, *factors])}." if factors else f"Write a multiple of {product}."
        work.wrong(TOTAL, f"{total} {verb} {sum_}", remedy)
