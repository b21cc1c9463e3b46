"""`amp`: NVIDIA's Apex, which DeepSpeed has dropped. What it did, fp16 with autocast, is there without it."""

from __future__ import annotations

from typing import Any

from plait.frontends.deepspeed.config.formats import OPEN, SCALER, compute, static_scale
from plait.frontends.deepspeed.config.keys import only, to, unneeded
from plait.frontends.deepspeed.config.kinds import ANY, FLAG, NUMBER, either, one_of
from plait.frontends.deepspeed.config.work import Key, Table, Work


def _level(work: Work) -> str:
    return str(work.look("amp.opt_level") or "O1").upper()


def _words(work: Work, key: str, value: Any) -> None:
    words = f"precision.compute: {compute(work)}"
    if _level(work) != "O0":
        words += ", with autocast" + (", precision.master: false" if _level(work) == "O3" else "")
    work.map(key, value, words)


TABLE: Table = {
    "enabled": Key(FLAG, _words, OPEN),
    "opt_level": Key(one_of("O0", "O1", "O2", "O3"), _words, OPEN),
    "loss_scale": Key(either(NUMBER, one_of("dynamic")), static_scale),
    "min_loss_scale": to(f"{SCALER}.minimum", NUMBER),
    "max_loss_scale": only(2.0**24, NUMBER, "the scale rarely gets there", "the scale has no upper end: leave it out"),
    "keep_batchnorm_fp32": unneeded(ANY, "statistics of batch norm are always fp32"),
    "master_weights": only(True, FLAG, "weights are kept in fp32", "write `fp16.fp16_master_weights_and_grads`"),
    **dict.fromkeys(
        ("verbosity", "num_losses", "patch_torch_functions", "cast_model_type", "cast_model_outputs"),
        unneeded(ANY, "it belongs to how Apex works inside"),
    ),
}


def finish(work: Work) -> None:
    """Scale as Apex does where it is told nothing else."""
    if _level(work) == "O3":
        work.put("precision.master", False, "amp.opt_level")
    if work.look("amp.loss_scale") in (None, 0, "dynamic"):
        work.put(f"{SCALER}.window", 2000, "amp.enabled")
        work.put(f"{SCALER}.hysteresis", 1, "amp.enabled")
        work.imply("amp.loss_scale", "precision.scaler: {window: 2000, hysteresis: 1}, as Apex scales")
