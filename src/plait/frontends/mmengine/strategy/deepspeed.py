"""`DeepSpeedStrategy`: the keys of a ds_config, translated where the DeepSpeed front end translates them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config.words import choose
from plait.errors import ConfigError, Problem
from plait.frontends.account import Account, Answer, Translation
from plait.frontends.deepspeed.config import read_config, translate
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy.base import BaseStrategy

_KEYS = (
    "zero_optimization",
    "gradient_clipping",
    "fp16",
    "bf16",
    "amp",
    "activation_checkpointing",
    "aio",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "steps_per_print",
)
"""The keys of a ds_config that MMEngine's strategy takes as arguments."""
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
        inputs_to_half: list[int | str] | None = None,
        exclude_frozen_parameters: bool | None = None,
        auto_scale_lr: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> None:
        """`keys` are those of a ds_config."""
        super().__init__(auto_scale_lr=auto_scale_lr)
        unknown = [key for key in keys if key not in _KEYS]
        if unknown:
            every = (*_KEYS, "config", "inputs_to_half", "exclude_frozen_parameters")
            raise ConfigError(
                [Problem(f"strategy.{key}", "there is no such key", choose(key, every, "key")) for key in unknown]
            )
        self._keys = {} if config is None else dict(read_config(config))
        self._keys.update({key: value for key, value in keys.items() if value is not None})
        self._half, self._exclude = inputs_to_half, exclude_frozen_parameters

    def translate(self, world_size: int) -> Translation:
        """What the DeepSpeed front end makes of the keys."""
        keys = {key: value for key, value in self._keys.items() if key not in _RUNNERS}
        found = translate(keys, world_size=world_size)
        account = Account(list(found.account.entries))
        for key, remedy in _RUNNERS.items():
            if key in self._keys:
                account.add(Answer.REFUSED, f"strategy.{key}", self._keys[key], remedy)
        if self._half is not None:
            text = "precision.cast_inputs: every floating-point input is cast, these among them"
            account.add(Answer.MAPPED, "strategy.inputs_to_half", self._half, text)
        if self._exclude:
            remedy = "a checkpoint holds all parameters: leave it out"
            account.add(Answer.REFUSED, "strategy.exclude_frozen_parameters", self._exclude, remedy)
        return Translation(dict(found.sections), account)
