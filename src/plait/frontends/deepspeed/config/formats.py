"""Which format a configuration computes in: four sections may say so."""

from __future__ import annotations

from typing import Any

from plait.config import show
from plait.frontends.deepspeed.config.kinds import named_format
from plait.frontends.deepspeed.config.work import Work

MODES = ("fp16", "bf16", "torch_autocast", "amp")
OPEN = "left open: off, unless the script asks for it"
SCALER = "precision.scaler"


def mode(work: Work) -> str | None:
    """The section that is switched on; None where none is."""
    return next((name for name in MODES if work.on(f"{name}.enabled")), None)


def compute(work: Work) -> str:
    """The format of parameters and activations."""
    found = mode(work)
    if found == "torch_autocast":
        return named_format(work.look("torch_autocast.dtype")) or "fp32"
    if found == "amp":
        return "fp32" if str(work.look("amp.opt_level")).upper() == "O0" else "fp16"
    return found or "fp32"


def static_scale(work: Work, key: str, value: Any) -> None:
    """A fixed scale of the loss; 0 is a dynamic one."""
    if value == 0 or value == "dynamic":
        work.honour(key, value, "the scale is dynamic")
    else:
        work.put(f"{SCALER}.static", value, key)
        work.honour(key, value, f"{SCALER}.static: {show(value)}")
