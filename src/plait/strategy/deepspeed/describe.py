"""A run description in DeepSpeed's words: the user's own `config`, completed from the rest of the run."""

from __future__ import annotations

import copy
from typing import Any

from plait.config import RunConfig, in_deepspeed_words, resolve_batch

_SAID_ELSEWHERE = ("optimizer", "steps_per_print", "bfloat16")


def describe(config: RunConfig, ranks: int, accumulation: int) -> dict[str, Any]:
    """A complete ds_config. What both say agrees; see `config/rules/engine.py`.

    Whatever DeepSpeed would choose by itself and Plait's engine chooses otherwise is written out.
    """
    strategy, precision = config.strategy, config.precision
    given = {key: value for key, value in (strategy.config or {}).items() if key not in _SAID_ELSEWHERE}
    found: dict[str, Any] = copy.deepcopy(given)
    micro = resolve_batch(config.batch, ranks).micro
    found |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro * accumulation * ranks,
        "gradient_clipping": config.train.clip_norm or 0.0,  # absent, it would be 1
        "bf16": {**_section(found, "bf16"), "enabled": precision.compute == "bf16"},
        "fp16": _fp16(found, config),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    zero = found["zero_optimization"] = {**_section(found, "zero_optimization"), "stage": strategy.stage}
    if strategy.stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is None:
        zero["stage3_gather_16bit_weights_on_model_save"] = False
    if precision.compute in ("bf16", "fp16"):
        found.setdefault("communication_data_type", precision.reduce)
        if strategy.stage > 0:
            found["data_types"] = {"grad_accum_dtype": precision.reduce, **_section(found, "data_types")}
    return found


def _section(found: dict[str, Any], key: str) -> dict[str, Any]:
    section = found.get(key)
    return {name: value for name, value in section.items() if value != "auto"} if isinstance(section, dict) else {}


def _fp16(found: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    enabled = config.precision.compute == "fp16"
    scaling = in_deepspeed_words(config.precision.scaler) if enabled else {}
    return {**_section(found, "fp16"), **scaling, "enabled": enabled}
