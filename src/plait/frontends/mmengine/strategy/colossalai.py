"""`ColossalAIStrategy`: its plugins are stages of ZeRO, which the engine here has too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from plait.frontends import Answer, Translation
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy.base import BaseStrategy
from plait.frontends.mmengine.strategy.table import Row, Sheet, honoured, refused, unneeded

_CHUNKS = "parameters are gathered block by block, not in chunks of a searched size"
_BUCKETS = "gradients are reduced block by block, not in buckets"
_FORMATS = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


def _format(sheet: Sheet, key: str, value: Any) -> None:
    word = value.get("type", "") if isinstance(value, Mapping) else str(value)
    if word in ("fp16_apex", "fp16_naive"):
        sheet.put("precision.compute", "fp16")
        sheet.account.add(Answer.MAPPED, key, value, "precision.compute: fp16, by torch and not by Apex")
    elif word in _FORMATS:
        sheet.put("precision.compute", _FORMATS[word])
        sheet.account.add(Answer.HONOURED, key, value, f"precision.compute: {word}")
    else:
        sheet.account.add(Answer.REFUSED, key, value, f"write one of {', '.join(_FORMATS)}")


def _initial_scale(sheet: Sheet, key: str, value: Any) -> None:
    power = math.log2(value) if value > 0 else -1.0
    if power < 0 or power != int(power):
        sheet.account.add(Answer.REFUSED, key, value, "write a power of two")
        return
    sheet.put("precision.scaler.initial_power", int(power))
    sheet.account.add(Answer.HONOURED, key, value, f"precision.scaler.initial_power: {int(power)}")


def _stage(sheet: Sheet, key: str, value: Any) -> None:
    if value not in (1, 2):
        sheet.account.add(Answer.REFUSED, key, value, "LowLevelZeroPlugin has stages 1 and 2; stage 3 is 'gemini'")
        return
    sheet.put("strategy.zero", int(value))
    sheet.account.add(Answer.HONOURED, key, value, f"strategy.zero: {value}")


def _offload(sheet: Sheet, key: str, value: Any) -> None:
    if value:
        sheet.put("strategy.offload.optimizer", "cpu")
        sheet.account.add(Answer.MAPPED, key, value, "strategy.offload.optimizer: cpu")
    else:
        sheet.account.add(Answer.UNNEEDED, key, value, "nothing is offloaded")


def _placement(sheet: Sheet, key: str, value: Any) -> None:
    if value in ("cuda", "static"):
        sheet.account.add(Answer.UNNEEDED, key, value, "what is offloaded, `strategy.offload` says")
    elif value == "cpu":
        sheet.put("strategy.offload", {"optimizer": "cpu", "params": "cpu"})
        sheet.account.add(Answer.MAPPED, key, value, "strategy.offload: parameters and optimizer in host memory")
    else:
        sheet.account.add(Answer.REFUSED, key, value, "memory is not moved by watching it: write 'cuda' or 'cpu'")


_SHARED: dict[str, Row] = {
    "precision": _format,
    "initial_scale": _initial_scale,
    "growth_interval": honoured("precision.scaler.window", int),
    "hysteresis": honoured("precision.scaler.hysteresis", int),
    "min_scale": honoured("precision.scaler.minimum", float),
    "growth_factor": refused("the scale doubles: leave it out", 2, 2.0),
    "backoff_factor": refused("the scale halves: leave it out", 0.5),
    "max_scale": unneeded("the scale ends where gradients overflow"),
    "max_norm": honoured("train.clip_norm", float),
    "norm_type": refused("gradients are measured by their 2-norm", 2, 2.0),
    "verbose": unneeded("what happens is in the log"),
    "overlap_communication": unneeded("reducing always overlaps with the backward pass"),
}
_PLUGINS: dict[str, dict[str, Row]] = {
    "GeminiPlugin": {
        **_SHARED,
        **dict.fromkeys(
            ("chunk_config_dict", "chunk_init_device", "search_range_m", "hidden_dim", "min_chunk_size_m", "memstats"),
            unneeded(_CHUNKS),
        ),
        "placement_policy": _placement,
        "pin_memory": unneeded("host memory is page-locked wherever the device can use it"),
        "force_outputs_fp32": unneeded("losses are in fp32 in any case"),
        "strict_ddp_mode": unneeded("gradients are summed in one order on all ranks"),
        "enable_gradient_accumulation": unneeded("`optim_wrapper.accumulative_counts` says it"),
        "shard_param_frac": refused("parameters are sharded whole", 1, 1.0),
        "offload_optim_frac": refused("write placement_policy='cpu' for all of it", 0, 0.0),
        "offload_param_frac": refused("write placement_policy='cpu' for all of it", 0, 0.0),
        "tp_size": honoured("strategy.layout.tp", int),
    },
    "LowLevelZeroPlugin": {
        **_SHARED,
        "stage": _stage,
        "cpu_offload": _offload,
        "reduce_bucket_size_in_m": unneeded(_BUCKETS),
        "communication_dtype": refused("write precision 'bf16' or 'fp16'; sums are in fp32"),
        "partition_grad": refused("that is stage 2: write stage=2", False),
    },
}
_NAMES = {"gemini": "GeminiPlugin", "lowlevel-zero": "LowLevelZeroPlugin"}


@STRATEGIES.register_module()
class ColossalAIStrategy(BaseStrategy):
    """Gemini is stage 3, low-level ZeRO stage 1 or 2; both train in fp16 unless told otherwise, as ColossalAI does."""

    default_wrapper = "ColossalAIOptimWrapper"

    def __init__(
        self,
        *,
        config: Any = None,
        mixed_precision: str | Mapping[str, Any] | None = None,
        plugin: str | Mapping[str, Any] = "gemini",
        model_wrapper: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._config, self._mixed, self._plugin, self._wrapper = config, mixed_precision, plugin, model_wrapper

    def translate(self, world_size: int) -> Translation:
        """The plugin's stage, and its defaults for what it does not say."""
        sheet = Sheet()
        given = {"type": self._plugin} if isinstance(self._plugin, str) else dict(self._plugin)
        name = str(given.pop("type", "gemini"))
        kind = _NAMES.get(name, name)
        key = "strategy.plugin"
        if kind not in _PLUGINS:
            sheet.account.add(Answer.REFUSED, key, name, f"write one of {', '.join((*_NAMES, *_PLUGINS))}")
            return Translation(sheet.sections, sheet.account)
        stage = 3 if kind == "GeminiPlugin" else 1
        sheet.put("strategy.zero", stage)
        sheet.put("precision.compute", "fp16")
        sheet.put("precision.scaler", {"initial_power": 16 if stage == 3 else 32, "window": 1000})
        sheet.account.add(Answer.MAPPED, key, name, f"strategy.zero: {stage}, in fp16 unless `precision` says another")
        sheet.walk(key, given, _PLUGINS[kind])
        if self._mixed is not None:
            _format(sheet, "strategy.mixed_precision", self._mixed)
        if sheet.sections["precision"]["compute"] != "fp16":
            del sheet.sections["precision"]["scaler"]
        if self._config is not None:
            remedy = "ColossalAI itself no longer reads one: leave it out"
            sheet.account.add(Answer.REFUSED, "strategy.config", self._config, remedy)
        if self._wrapper is not None:
            text = "the model is not wrapped: its blocks are sharded in place"
            sheet.account.add(Answer.UNNEEDED, "strategy.model_wrapper", self._wrapper, text)
        return Translation(sheet.sections, sheet.account)
