"""From `optim_wrapper=dict(type=…, optimizer=dict(…), paramwise_cfg=…)` to a wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from plait.config import choose
from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.optim import named, optimizers  # noqa: F401  # they register themselves
from plait.frontends.mmengine.optim.wrapper import BaseOptimWrapper, OptimWrapper
from plait.frontends.mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from plait.torch_internals import AnyBatchNorm, AnyInstanceNorm

_NORMS = (AnyBatchNorm, AnyInstanceNorm, nn.GroupNorm, nn.LayerNorm)
_PARAMWISE = (
    "custom_keys",
    "bias_lr_mult",
    "bias_decay_mult",
    "norm_decay_mult",
    "dwconv_decay_mult",
    "flat_decay_mult",
    "bypass_duplicate",
    "dcn_offset_lr_mult",
)


def build_optim_wrapper(cfg: Any, model: nn.Module, *, default: str = "OptimWrapper") -> BaseOptimWrapper:
    """The wrapper that `cfg` describes, over the parameters of a model; `default` is its type where none is named."""
    if isinstance(cfg, BaseOptimWrapper):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(optimizer=cfg)
    if not isinstance(cfg, Mapping):
        message = f"a {type(cfg).__name__} is no optim wrapper"
        remedy = "Give a dict, an OptimWrapper of plait.frontends.mmengine, or a torch optimizer."
        raise ConfigError(Problem("optim_wrapper", message, remedy))
    options = {"type": default, **cfg}
    constructor = options.pop("constructor", "DefaultOptimWrapperConstructor")
    paramwise = options.pop("paramwise_cfg", None)
    settings = {"optim_wrapper_cfg": options, "paramwise_cfg": paramwise}
    made: BaseOptimWrapper = OPTIM_WRAPPER_CONSTRUCTORS.build({"type": constructor, **settings})(model)
    return made


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DefaultOptimWrapperConstructor:
    """One group of all parameters, or one group each where `paramwise_cfg` gives some their own rate or decay."""

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", None)
        self.paramwise_cfg = dict(paramwise_cfg or {})
        if self.optimizer_cfg is None:
            raise ConfigError(
                Problem("optim_wrapper.optimizer", "there is none", "Write optimizer=dict(type='AdamW').")
            )
        unknown = [key for key in self.paramwise_cfg if key not in _PARAMWISE]
        if unknown:
            path = "optim_wrapper.paramwise_cfg"
            raise ConfigError(
                [Problem(f"{path}.{key}", "there is no such key", choose(key, _PARAMWISE, "key")) for key in unknown]
            )

    def __call__(self, model: nn.Module) -> BaseOptimWrapper:
        """The wrapper over a model's parameters."""
        optimizer = self.optimizer_cfg
        if isinstance(optimizer, Mapping):
            params: Any = list(self.groups(model)) if self.paramwise_cfg else list(model.parameters())
            optimizer = OPTIMIZERS.build(optimizer, default_args={"params": params})
        made = OPTIM_WRAPPERS.build(self.optim_wrapper_cfg, default_args={"optimizer": optimizer})
        if not isinstance(made, BaseOptimWrapper):
            message = f"a {type(made).__name__} drives the parameters itself, and here the engine does"
            remedy = "Derive it from plait.frontends.mmengine.OptimWrapper."
            raise ConfigError(Problem("optim_wrapper.type", message, remedy))
        return made

    def groups(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """A group for each trainable parameter, with what `paramwise_cfg` says of it."""
        seen: set[nn.Parameter] = set()
        for prefix, module in model.named_modules():
            for name, param in module.named_parameters(recurse=False):
                if param.requires_grad and param not in seen:
                    seen.add(param)
                    yield {"params": [param], **self._options(module, prefix, name, param)}

    def _options(self, module: nn.Module, prefix: str, name: str, param: nn.Parameter) -> dict[str, Any]:
        given = self.paramwise_cfg
        custom: Mapping[str, Mapping[str, Any]] = given.get("custom_keys", {})
        full = f"{prefix}.{name}" if prefix else name
        # The longest key that fits counts; of equally long ones the first in the alphabet.
        for key in sorted(sorted(custom), key=len, reverse=True):
            if key in full:
                return self._custom(custom[key], key)
        options: dict[str, Any] = {}
        is_norm = isinstance(module, _NORMS)
        if name == "bias" and not is_norm and (factor := given.get("bias_lr_mult")) is not None:
            options["lr"] = self._base("lr", "bias_lr_mult") * factor
        depthwise = isinstance(module, nn.Conv2d) and module.in_channels == module.groups
        rules = (
            ("norm_decay_mult", is_norm),
            ("bias_decay_mult", name == "bias"),
            ("dwconv_decay_mult", depthwise),
            ("flat_decay_mult", param.ndim == 1),
        )
        for key, fits in rules:
            if fits and (factor := given.get(key)) is not None:
                options["weight_decay"] = self._base("weight_decay", key) * factor
                break
        return options

    def _custom(self, settings: Mapping[str, Any], key: str) -> dict[str, Any]:
        options: dict[str, Any] = dict(settings)
        path = f"custom_keys.{key}"
        options["lr"] = self._base("lr", f"{path}.lr_mult") * options.pop("lr_mult", 1.0)
        factor = options.pop("decay_mult", None)
        if factor is not None or "weight_decay" in self.optimizer_cfg:
            options["weight_decay"] = self._base("weight_decay", f"{path}.decay_mult") * (
                1.0 if factor is None else factor
            )
        return options

    def _base(self, what: str, key: str) -> float:
        if not isinstance(self.optimizer_cfg, Mapping) or what not in self.optimizer_cfg:
            message = f"it multiplies the optimizer's `{what}`, which is not given"
            raise ConfigError(
                Problem(f"optim_wrapper.paramwise_cfg.{key}", message, f"Write optimizer=dict({what}=…).")
            )
        return float(self.optimizer_cfg[what])
