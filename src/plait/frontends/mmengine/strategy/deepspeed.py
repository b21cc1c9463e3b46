"""`DeepSpeedStrategy`: the keys of a ds_config, translated where the DeepSpeed front end translates them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.frontends import Account, Answer, Translation
from plait.frontends.deepspeed import read_config, translate
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy.base import BaseStrategy

_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_SINKS = "numbers go where `visualizer` says: write vis_backends=[dict(type='TensorboardVisBackend')]"
_RUNNERS = {
    "optimizer": "the optimizer is that of `optim_wrapper`: leave it out",
    "scheduler": "schedules are those of `param_scheduler`: leave it out",
}


@STRATEGIES.register_module()
class DeepSpeedStrategy(BaseStrategy):
    """ZeRO as DeepSpeed describes it: a file or dict as `config`, and single keys over it."""

    default_wrapper = "DeepSpeedOptimWrapper"
    own_wrapper = True

    def __init__(
        self,
        *,
        config: Any = None,
        zero_optimization: Mapping[str, Any] | None = None,
        gradient_clipping: float | None = None,
        fp16: Mapping[str, Any] | None = None,
        inputs_to_half: list[int | str] | None = None,
        bf16: Mapping[str, Any] | None = None,
        amp: Mapping[str, Any] | None = None,
        activation_checkpointing: Mapping[str, Any] | None = None,
        aio: Mapping[str, Any] | None = None,
        train_micro_batch_size_per_gpu: int | None = None,
        gradient_accumulation_steps: int | None = None,
        steps_per_print: int | None = None,
        exclude_frozen_parameters: bool | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(auto_scale_lr=auto_scale_lr)
        over = {
            "zero_optimization": zero_optimization,
            "gradient_clipping": gradient_clipping,
            "fp16": fp16,
            "bf16": bf16,
            "amp": amp,
            "activation_checkpointing": activation_checkpointing,
            "aio": aio,
            "train_micro_batch_size_per_gpu": train_micro_batch_size_per_gpu,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "steps_per_print": steps_per_print,
        }
        self._keys = {} if config is None else dict(read_config(config))
        self._keys.update({key: value for key, value in over.items() if value is not None})
        self._half, self._exclude = inputs_to_half, exclude_frozen_parameters

    def translate(self, world_size: int) -> Translation:
        """What the DeepSpeed front end makes of the keys."""
        told = [key for key in _MONITORS if dict(self._keys.get(key) or {}).get("enabled")]
        keys = {key: value for key, value in self._keys.items() if key not in (*_RUNNERS, *told)}
        found = translate(keys, world_size=world_size)
        account = Account(list(found.account.entries))
        for key, remedy in {**_RUNNERS, **dict.fromkeys(told, _SINKS)}.items():
            if key in self._keys:
                account.add(Answer.REFUSED, f"strategy.{key}", self._keys[key], remedy)
        sections = dict(found.sections)
        if self._half is not None:
            if sections.get("precision", {}).get("compute", "fp32") != "fp32":
                sections["precision"] = {**sections["precision"], "cast_inputs": True}
            text = "precision.cast_inputs: every floating-point input is cast, these among them"
            account.add(Answer.MAPPED, "strategy.inputs_to_half", self._half, text)
        if self._exclude:
            remedy = "a checkpoint holds all parameters: leave it out"
            account.add(Answer.REFUSED, "strategy.exclude_frozen_parameters", self._exclude, remedy)
        return Translation(sections, account)
