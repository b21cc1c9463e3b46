"""What happens to gradients between the backward pass and the update."""

from __future__ import annotations

from plait.config import show
from plait.frontends.deepspeed.config.keys import only, unneeded
from plait.frontends.deepspeed.config.kinds import FLAG, NUMBER, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work

CLIPPING = "gradient_clipping"
_DEFAULT_CLIPPING = 1.0
_MEAN = "gradients are averaged over ranks in any case; it only says when they are divided"


def _clip(work: Work, key: str, value: float) -> None:
    if value == 0:
        work.honour(key, value, "no clipping")
    else:
        work.put("train.clip_norm", value, key)
        work.honour(key, value, f"train.clip_norm: {show(value)}")


def clip_by_default(work: Work) -> None:
    """DeepSpeed 0.19 clips at 1 where it is told nothing."""
    if work.look(CLIPPING) is None:
        work.put("train.clip_norm", _DEFAULT_CLIPPING, CLIPPING)
        work.imply(CLIPPING, "train.clip_norm: 1.0 is DeepSpeed's default; 0 there switches it off")


TABLE: Table = {
    CLIPPING: Key(NUMBER, _clip),
    "prescale_gradients": unneeded(FLAG, _MEAN),
    "gradient_predivide_factor": unneeded(NUMBER, _MEAN),
    "gradient_allreduce_op": only(
        "mean", one_of("mean", "sum"), _MEAN, "gradients are averaged: multiply the loss by the number of ranks"
    ),
    "disable_allgather": unneeded(FLAG, "how updated weights reach the other ranks does not change them"),
}
