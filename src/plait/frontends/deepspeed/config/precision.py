"""`fp16`, `bf16`, `torch_autocast`, `amp`, and the formats of sums: one section `precision`."""

from __future__ import annotations

from typing import Any

from plait.config import listed, show
from plait.frontends.deepspeed.config.work import (
    ANY,
    COUNT,
    FLAG,
    FORMAT,
    NUMBER,
    SECTION,
    SIZE,
    TEXTS,
    Key,
    Table,
    Work,
    dormant,
    either,
    group,
    named_format,
    one_of,
    only,
    to,
    unneeded,
)

# Which format a configuration computes in: four sections may say so.


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


# `amp`: NVIDIA's Apex, which DeepSpeed has dropped. What it did, fp16 with autocast, is there without it.


def _level(work: Work) -> str:
    return str(work.look("amp.opt_level") or "O1").upper()


def _words(work: Work, key: str, value: Any) -> None:
    words = f"precision.compute: {compute(work)}"
    if _level(work) != "O0":
        words += ", with autocast" + (", precision.master: false" if _level(work) == "O3" else "")
    work.map(key, value, words)


APEX_TABLE: Table = {
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


def finish_apex(work: Work) -> None:
    """Scale as Apex does where it is told nothing else."""
    if _level(work) == "O3":
        work.put("precision.master", False, "amp.opt_level")
    if work.look("amp.loss_scale") in (None, 0, "dynamic"):
        work.put(f"{SCALER}.window", 2000, "amp.enabled")
        work.put(f"{SCALER}.hysteresis", 1, "amp.enabled")
        work.imply("amp.loss_scale", "precision.scaler: {window: 2000, hysteresis: 1}, as Apex scales")


def _moving(name: str, kind: Any) -> Key:
    """A setting of the dynamic scale; beside a fixed one it has nothing to move."""
    there = to(f"{SCALER}.{name}", kind)

    def act(work: Work, key: str, value: Any) -> None:
        if work.look("fp16.loss_scale"):
            work.leave(key, value, "the scale is fixed by `loss_scale`")
        else:
            there.act(work, key, value)

    return Key(kind, act)


def _low_master(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("precision.master", False, key)
        work.map(key, value, "precision.master: false (weights, and the optimizer's states, are in the low format)")
    else:
        work.honour(key, value, "precision.master: true")


def _low_states(work: Work, key: str, value: bool) -> None:
    if value and not work.on("bf16.bf16_master_weights_and_grads"):
        message = "true goes only with `bf16.bf16_master_weights_and_grads`, which is off"
        work.wrong(key, message, "Write both, or neither.")
    elif value:
        work.honour(key, value, "states are in the format of the weights, which have no fp32 copy")
    else:
        work.leave(key, value, "states are in the format of the weights that are updated")


def _overflow(work: Work, key: str, value: bool) -> None:
    if not value:
        work.put("train.guard.enabled", False, key)
    work.honour(key, value, f"train.guard.enabled: {show(value)}")


def _enabled(words: str) -> Key:
    return Key(FLAG, lambda work, key, value: work.honour(key, value, words), OPEN)


FP16: Table = {
    "enabled": _enabled("precision.compute: fp16; inputs are cast by the script"),
    "auto_cast": to("precision.cast_inputs", FLAG),
    "loss_scale": Key(NUMBER, static_scale),
    "initial_scale_power": _moving("initial_power", SIZE),
    "loss_scale_window": _moving("window", COUNT),
    "hysteresis": _moving("hysteresis", COUNT),
    "consecutive_hysteresis": _moving("consecutive_hysteresis", FLAG),
    "min_loss_scale": _moving("minimum", NUMBER),
    "fp16_master_weights_and_grads": Key(FLAG, _low_master),
}
_BF16: Table = {
    "enabled": _enabled("precision.compute: bf16; inputs are cast by the script"),
    "immediate_grad_update": unneeded(FLAG, "when a gradient is added up does not change the sum"),
    "check_grad_overflow": Key(FLAG, _overflow),
    "bf16_master_weights_and_grads": Key(FLAG, _low_master),
    "bf16_optimizer_states": Key(FLAG, _low_states),
}
_AUTOCAST: Table = {
    "enabled": _enabled("precision.autocast: true"),
    "dtype": Key(FORMAT, lambda work, key, value: work.honour(key, value, f"precision.compute: {compute(work)}")),
    "lower_precision_safe_modules": unneeded(
        TEXTS, "it says whose gradients are summed in the low format, and here all are summed in `precision.reduce`"
    ),
}


def _mode(name: str, table: Table) -> Key:
    def act(work: Work, key: str, value: Any) -> None:
        open_ = value.get("enabled") == "auto"
        why = f"`{name}` is left open" if open_ else f"`{name}` is off"
        off_table = {**dormant(table, why), "enabled": Key(FLAG, lambda w, k, v: w.honour(k, v, "off"), OPEN)}
        work.walk(key, value, table if work.on(f"{name}.enabled") else off_table)

    return Key(SECTION, act)


def _sums(work: Work, key: str, value: Any) -> None:
    work.map(key, value, f"precision.reduce: {_reduce(work)[0]} (sums over micro-batches and ranks have one format)")


def _reduce(work: Work) -> tuple[str, str]:
    """The format that gradients are summed in, the widest that is asked for, and the key that asks for it."""
    asked = {key: named_format(work.look(key)) for key in ("communication_data_type", "data_types.grad_accum_dtype")}
    if work.on("fp32_allreduce"):
        asked["fp32_allreduce"] = "fp32"
    given = {key: found for key, found in asked.items() if found}
    for key, found in given.items():
        if found == "fp32":
            return found, key
    if given:
        key = next(iter(given))
        return given[key], key
    low = mode(work) in ("fp16", "bf16")
    return (compute(work) if low else "fp32"), f"{mode(work)}.enabled"


def _parameters(work: Work, key: str, value: Any) -> None:
    if named_format(value) != compute(work):
        message = f"{value}, but `{mode(work) or 'fp16 and bf16'}` makes it {compute(work)}"
        work.wrong(key, message, "Leave it out, or switch on the section of that format.")
    else:
        work.honour(key, value, f"precision.compute: {compute(work)}")


def _buffers(work: Work, key: str, value: str) -> None:
    work.refuse(key, value, "buffers keep the format that the model gives them: leave it out")


_KEPT = "names of modules cannot be kept in fp32; batch norm always is. Write the casts in the model"
_DATA_TYPES: Table = {
    "grad_accum_dtype": Key(FORMAT, _sums),
    "param_dtype": Key(FORMAT, _parameters),
    "buffer_dtype": Key(FORMAT, _buffers),
    "keep_in_fp32_modules": Key(
        either(one_of("auto"), TEXTS),
        lambda w, k, v: w.leave(k, v, "batch norm is kept in fp32") if v == "auto" or not v else w.refuse(k, v, _KEPT),
        knows_auto=True,
    ),
}

PRECISION_TABLE: Table = {
    "fp16": _mode("fp16", FP16),
    "bf16": _mode("bf16", _BF16),
    "torch_autocast": _mode("torch_autocast", _AUTOCAST),
    "amp": _mode("amp", APEX_TABLE),
    "communication_data_type": Key(one_of("fp32", "fp16", "bf16"), _sums),
    "fp32_allreduce": Key(
        FLAG,
        lambda w, k, v: w.map(k, v, "precision.reduce: fp32") if v else w.leave(k, v, "sums are as the format says"),
    ),
    "data_types": group(_DATA_TYPES),
}


def finish(work: Work) -> None:
    """Write the section, once all that has a say in it is known."""
    if _contradicts_itself(work):
        return
    found, format_ = mode(work), compute(work)
    if format_ != "fp32":
        work.put("precision.compute", format_, f"{found}.enabled")
    reduce, source = _reduce(work)
    if reduce != "fp32":
        work.put("precision.reduce", reduce, source)
        if source == f"{found}.enabled":
            work.imply("communication_data_type", f"precision.reduce: {reduce}, the format of the gradients")
    if found in ("fp16", "bf16"):
        if not work.on("torch_autocast.enabled"):
            work.put("precision.autocast", False, f"{found}.enabled")
        if "precision.cast_inputs" not in work.sources:
            work.put("precision.cast_inputs", False, f"{found}.enabled")
    if found == "amp" and format_ == "fp16":
        finish_apex(work)


def _contradicts_itself(work: Work) -> bool:
    """One format is computed in; autocast may stand on top of the same."""
    modes = [f"{name}.enabled" for name in ("fp16", "bf16", "amp") if work.on(f"{name}.enabled")]
    if len(modes) > 1:
        work.wrong(modes[0], f"true, and so {'is' if len(modes) == 2 else 'are'} `{listed(modes[1:])}`", "Keep one.")
        return True
    if not work.on("torch_autocast.enabled"):
        return False
    key, asked = "torch_autocast.dtype", work.look("torch_autocast.dtype")
    if asked is None:
        work.wrong(
            key, "there is none: torch would take fp16 on CUDA and bf16 on a CPU", "Write `bfloat16` or `float16`."
        )
    elif modes and named_format(asked) != compute(work):
        work.wrong(key, f"{asked}, but `{modes[0]}` asks for {compute(work)}", "Write the same in both, or keep one.")
    else:
        return False
    return True
