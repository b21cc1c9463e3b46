"""Translates `fp16`, `bf16`, `torch_autocast`, `amp`, and the dtypes of reductions into the section `precision`."""

from __future__ import annotations

from typing import Any

from plait.config import listed, show
from plait.frontends import honoured, refused, refused_unless, unneeded
from plait.frontends.deepspeed.config.keys import (
    ANY,
    COUNT,
    DTYPE,
    FLAG,
    NUMBER,
    SECTION,
    SIZE,
    TEXTS,
    DeepSpeedSettings,
    Key,
    Table,
    ValueType,
    all_unneeded,
    dtype_name,
    either,
    mapped_if_on,
    one_of,
    same_keys,
    section,
    setting,
)

# The compute dtype, which four sections can set.


MODES = ("fp16", "bf16", "torch_autocast", "amp")
OPEN = "left open: off, unless the script asks for it"
SCALER = "precision.scaler"


def mode(settings: DeepSpeedSettings) -> str | None:
    """Return the name of the precision section that is enabled; None if none is."""
    return next((name for name in MODES if settings.is_on(f"{name}.enabled")), None)


def compute(settings: DeepSpeedSettings) -> str:
    """Return the compute dtype: `fp32`, `fp16` or `bf16`."""
    section = mode(settings)
    if section == "torch_autocast":
        return dtype_name(settings.given("torch_autocast.dtype")) or "fp32"
    if section == "amp":
        return "fp32" if str(settings.given("amp.opt_level")).upper() == "O0" else "fp16"
    return section or "fp32"


def static_scale(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    """Translate a fixed loss scale; 0 means a dynamic one."""
    if value == 0 or value == "dynamic":
        settings.honoured(key, value, "the scale is dynamic")
    else:
        settings.set(f"{SCALER}.static", value, key)
        settings.honoured(key, value, f"{SCALER}.static: {show(value)}")


# `amp`: NVIDIA's Apex, which DeepSpeed has removed. It is translated to fp16 with torch's autocast.


def _opt_level(settings: DeepSpeedSettings) -> str:
    return str(settings.given("amp.opt_level") or "O1").upper()


def _apex_precision(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    text = f"precision.compute: {compute(settings)}"
    if _opt_level(settings) != "O0":
        text += ", with autocast" + (", precision.master: false" if _opt_level(settings) == "O3" else "")
    settings.mapped(key, value, text)


APEX_TABLE: Table = {
    "enabled": Key(FLAG, _apex_precision, OPEN),
    "opt_level": Key(one_of("O0", "O1", "O2", "O3"), _apex_precision, OPEN),
    "loss_scale": Key(either(NUMBER, one_of("dynamic")), static_scale),
    "min_loss_scale": setting(f"{SCALER}.minimum", NUMBER),
    "max_loss_scale": Key(
        NUMBER,
        refused_unless("the scale has no upper end: leave it out", 2.0**24, why="the scale rarely grows that far"),
    ),
    "keep_batchnorm_fp32": Key(ANY, unneeded("statistics of batch norm are always fp32")),
    "master_weights": Key(
        FLAG, refused_unless("write `fp16.fp16_master_weights_and_grads`", True, why="weights are kept in fp32")
    ),
    **same_keys(
        "verbosity num_losses patch_torch_functions cast_model_type cast_model_outputs",
        ANY,
        unneeded("it configures Apex itself"),
    ),
}


def finish_apex(settings: DeepSpeedSettings) -> None:
    """Set the loss scaler to the defaults of Apex."""
    if _opt_level(settings) == "O3":
        settings.set("precision.master", False, "amp.opt_level")
    if settings.given("amp.loss_scale") in (None, 0, "dynamic"):
        settings.set(f"{SCALER}.window", 2000, "amp.enabled")
        settings.set(f"{SCALER}.hysteresis", 1, "amp.enabled")
        settings.implied("amp.loss_scale", "precision.scaler: {window: 2000, hysteresis: 1}, as Apex scales")


def _dynamic_scale(name: str, takes: ValueType) -> Key:
    """Return a reader for a setting of the dynamic loss scale; it is unneeded if the scale is fixed."""
    dynamic = setting(f"{SCALER}.{name}", takes)

    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        if settings.given("fp16.loss_scale"):
            settings.unneeded(key, value, "the scale is fixed by `loss_scale`")
        else:
            dynamic(settings, key, value)

    return Key(takes, read)


def _no_fp32_master(settings: DeepSpeedSettings, key: str, value: bool) -> None:
    if value:
        settings.set("precision.master", False, key)
        settings.mapped(
            key, value, "precision.master: false (weights, and the optimizer's states, have the compute format)"
        )
    else:
        settings.honoured(key, value, "precision.master: true")


def _bf16_states(settings: DeepSpeedSettings, key: str, value: bool) -> None:
    if value and not settings.is_on("bf16.bf16_master_weights_and_grads"):
        message = "true goes only with `bf16.bf16_master_weights_and_grads`, which is off"
        settings.wrong(key, message, "Write both, or neither.")
    elif value:
        settings.honoured(key, value, "states are in the format of the weights, which have no fp32 copy")
    else:
        settings.unneeded(key, value, "states are in the format of the weights that are updated")


def _overflow(settings: DeepSpeedSettings, key: str, value: bool) -> None:
    if not value:
        settings.set("train.guard.enabled", False, key)
    settings.honoured(key, value, f"train.guard.enabled: {show(value)}")


def _enabled(text: str) -> Key:
    return Key(FLAG, honoured(text), OPEN)


FP16: Table = {
    "enabled": _enabled("precision.compute: fp16; inputs are cast by the script"),
    "auto_cast": setting("precision.cast_inputs", FLAG),
    "loss_scale": Key(NUMBER, static_scale),
    "initial_scale_power": _dynamic_scale("initial_power", SIZE),
    "loss_scale_window": _dynamic_scale("window", COUNT),
    "hysteresis": _dynamic_scale("hysteresis", COUNT),
    "consecutive_hysteresis": _dynamic_scale("consecutive_hysteresis", FLAG),
    "min_loss_scale": _dynamic_scale("minimum", NUMBER),
    "fp16_master_weights_and_grads": Key(FLAG, _no_fp32_master),
}
_BF16: Table = {
    "enabled": _enabled("precision.compute: bf16; inputs are cast by the script"),
    "immediate_grad_update": Key(FLAG, unneeded("when a gradient is added up does not change the sum")),
    "check_grad_overflow": Key(FLAG, _overflow),
    "bf16_master_weights_and_grads": Key(FLAG, _no_fp32_master),
    "bf16_optimizer_states": Key(FLAG, _bf16_states),
}
_AUTOCAST: Table = {
    "enabled": _enabled("precision.autocast: true"),
    "dtype": Key(
        DTYPE, lambda settings, key, value: settings.honoured(key, value, f"precision.compute: {compute(settings)}")
    ),
    "lower_precision_safe_modules": Key(
        TEXTS,
        unneeded(
            "it lists modules whose gradients are reduced in 16 bits, and here all are reduced in `precision.reduce`"
        ),
    ),
}


def _mode(name: str, table: Table) -> Key:
    def read(settings: DeepSpeedSettings, key: str, value: Any) -> None:
        why = f"`{name}` is left open" if value.get("enabled") == "auto" else f"`{name}` is off"
        table_if_off = {**all_unneeded(table, why), "enabled": Key(FLAG, honoured("off"), OPEN)}
        settings.read(value, table if settings.is_on(f"{name}.enabled") else table_if_off, key)

    return Key(SECTION, read)


def _reduce_format(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    settings.mapped(
        key,
        value,
        f"precision.reduce: {_reduce(settings)[0]} (one format for accumulation and for the reduction over ranks)",
    )


def _reduce(settings: DeepSpeedSettings) -> tuple[str, str]:
    """Return the dtype that gradients are reduced in, the widest of those given, and the key that sets it."""
    by_key = {
        key: dtype_name(settings.given(key)) for key in ("communication_data_type", "data_types.grad_accum_dtype")
    }
    if settings.is_on("fp32_allreduce"):
        by_key["fp32_allreduce"] = "fp32"
    given = {key: dtype for key, dtype in by_key.items() if dtype}
    if given:
        key = next((key for key, dtype in given.items() if dtype == "fp32"), next(iter(given)))
        return given[key], key
    dtype = compute(settings) if mode(settings) in ("fp16", "bf16") else "fp32"
    return dtype, f"{mode(settings)}.enabled"


def _param_dtype(settings: DeepSpeedSettings, key: str, value: Any) -> None:
    if dtype_name(value) != compute(settings):
        message = f"{value}, but `{mode(settings) or 'fp16 and bf16'}` makes it {compute(settings)}"
        settings.wrong(key, message, "Leave it out, or switch on the section of that format.")
    else:
        settings.honoured(key, value, f"precision.compute: {compute(settings)}")


_FP32_MODULES = (
    "single modules cannot be kept in fp32, except batch norm, which always is: write the casts in the model"
)
_DATA_TYPES: Table = {
    "grad_accum_dtype": Key(DTYPE, _reduce_format),
    "param_dtype": Key(DTYPE, _param_dtype),
    "buffer_dtype": Key(DTYPE, refused("buffers keep the format that the model gives them: leave it out")),
    "keep_in_fp32_modules": Key(
        either(one_of("auto"), TEXTS),
        refused_unless(_FP32_MODULES, "auto", [], (), why="batch norm is kept in fp32"),
        auto_is_a_value=True,
    ),
}


PRECISION_TABLE: Table = {
    "fp16": _mode("fp16", FP16),
    "bf16": _mode("bf16", _BF16),
    "torch_autocast": _mode("torch_autocast", _AUTOCAST),
    "amp": _mode("amp", APEX_TABLE),
    "communication_data_type": Key(one_of("fp32", "fp16", "bf16"), _reduce_format),
    "fp32_allreduce": mapped_if_on(
        "precision.reduce: fp32", if_off="gradients are summed in the format of the other keys"
    ),
    "data_types": section(_DATA_TYPES),
}


def finish(settings: DeepSpeedSettings) -> None:
    """Set the section `precision`, after all of its keys have been read."""
    if _contradicts_itself(settings):
        return
    section, dtype = mode(settings), compute(settings)
    if dtype != "fp32":
        settings.set("precision.compute", dtype, f"{section}.enabled")
    reduce, source = _reduce(settings)
    if reduce != "fp32":
        settings.set("precision.reduce", reduce, source)
        if source == f"{section}.enabled":
            settings.implied("communication_data_type", f"precision.reduce: {reduce}, the format of the gradients")
    if section in ("fp16", "bf16"):
        if not settings.is_on("torch_autocast.enabled"):
            settings.set("precision.autocast", False, f"{section}.enabled")
        if "precision.cast_inputs" not in settings.sources:
            settings.set("precision.cast_inputs", False, f"{section}.enabled")
    if section == "amp" and dtype == "fp16":
        finish_apex(settings)


def _contradicts_itself(settings: DeepSpeedSettings) -> bool:
    """Return whether sections contradict each other, with a problem recorded; autocast may repeat its own dtype."""
    modes = [f"{name}.enabled" for name in ("fp16", "bf16", "amp") if settings.is_on(f"{name}.enabled")]
    if len(modes) > 1:
        settings.wrong(
            modes[0], f"true, and so {'is' if len(modes) == 2 else 'are'} `{listed(modes[1:])}`", "Keep one."
        )
        return True
    if not settings.is_on("torch_autocast.enabled"):
        return False
    key, dtype = "torch_autocast.dtype", settings.given("torch_autocast.dtype")
    if dtype is None:
        settings.wrong(
            key, "it is absent: torch would take fp16 on CUDA and bf16 on a CPU", "Write `bfloat16` or `float16`."
        )
    elif modes and dtype_name(dtype) != compute(settings):
        settings.wrong(
            key, f"{dtype}, but `{modes[0]}` asks for {compute(settings)}", "Write the same in both, or keep one."
        )
    else:
        return False
    return True
