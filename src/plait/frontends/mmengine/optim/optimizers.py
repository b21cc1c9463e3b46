"""Optimizers by name, and optim wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from plait.config import choose
from plait.engine import ManualEngine, StepResult
from plait.errors import ConfigError, Problem, TrainingError
from plait.frontends.mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from plait.optim import Lion
from plait.precision import AnyBatchNorm, AnyInstanceNorm

OPTIMIZERS.register_module(module=Lion)
for _name, _cls in vars(torch.optim).items():
    if isinstance(_cls, type) and issubclass(_cls, Optimizer) and _cls is not Optimizer:
        OPTIMIZERS.register_module(name=_name, module=_cls)


@OPTIMIZERS.register_module(name=["HybridAdam", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam"])
def HybridAdam(  # noqa: N802  # MMEngine's name, of a class
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    adam_w_mode: bool | None = None,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
    set_grad_none: bool = True,
    fp32_optimizer_states: bool = True,
) -> Optimizer:
    """Return the optimizer for ColossalAI's and DeepSpeed's Adam: torch's AdamW, or Adam if `adamw_mode` is false.

    The strategy decides where states are stored; options that change the result or the place of states are refused.
    """
    refused = {
        "bias_correction": not bias_correction,
        "nvme_offload_fraction": nvme_offload_fraction > 0 or nvme_offload_dir is not None,
        "fp32_optimizer_states": not fp32_optimizer_states,
    }
    problems = [
        Problem(f"optimizer.{key}", "torch's Adam has no such option", "Leave it out.")
        for key, wanted in refused.items()
        if wanted
    ]
    if problems:
        raise ConfigError(problems)
    cls = AdamW if (adamw_mode if adam_w_mode is None else adam_w_mode) else Adam
    return cls(params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


# Optim wrappers, through which a model's `train_step` calls the engine: precision context, backward and update.


class BaseOptimWrapper:
    """The base class: an optimizer with settings for gradient accumulation, clipping and precision."""

    precision: dict[str, Any] | None = None
    """The section `precision` of the run description that this wrapper sets; None: it does not set it."""

    def __init__(
        self, optimizer: Optimizer, accumulative_counts: int = 1, clip_grad: Mapping[str, Any] | None = None
    ) -> None:
        is_int = isinstance(accumulative_counts, int) and not isinstance(accumulative_counts, bool)
        if not is_int or accumulative_counts < 1:
            message = f"{accumulative_counts!r} is not a number of batches"
            raise ConfigError(Problem("optim_wrapper.accumulative_counts", message, "Write 1 or more."))
        self.optimizer = optimizer
        self.clip = read_clip(clip_grad)
        """The keys of the section `train` of the run description for `clip_grad`."""
        self._counts = accumulative_counts
        self._inner_count = 0
        self._max_counts = -1
        self._engine: ManualEngine | None = None
        self._context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.last_result: StepResult | None = None
        """The result of the latest update; None before the first."""
        # With several groups, schedules also change the optimizer's default settings, and the log shows them.
        several = len(optimizer.param_groups) > 1
        self.base_param_settings = {"params": [], **optimizer.defaults} if several else None

    # ---- the engine, and what the model calls

    def attach(self, engine: ManualEngine, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Attach the engine; `context` returns the precision context of a forward pass."""
        self._engine, self._context = engine, context

    @property
    def engine(self) -> ManualEngine:
        """The engine; raises `TrainingError` before the runner has prepared the model."""
        if self._engine is None:
            raise TrainingError("the optim wrapper has no engine yet: the runner attaches one in `train()`")
        return self._engine

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """A `with` block for a forward pass, in the precision of the run."""
        with self._context():
            yield

    def update_params(
        self, loss: Tensor, step_kwargs: Mapping[str, Any] | None = None, zero_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Run backward from a loss; update the weights if accumulation is complete."""
        self.backward(self.scale_loss(loss))
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from a loss that `scale_loss` has divided."""
        self.engine.backward(loss, last=self.should_sync(), **kwargs)
        self._inner_count += 1

    def step(self) -> None:
        """Update the weights with the accumulated gradients."""
        self.last_result = self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the update itself discards gradients."""

    # ---- counting

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Set the number of batches so far and in total; the last update of a run may have fewer batches."""
        self._inner_count, self._max_counts = init_counts, max_counts

    @property
    def inner_count(self) -> int:
        """Batches so far."""
        return self._inner_count

    @property
    def accumulative_counts(self) -> int:
        """Batches per update."""
        return self._counts

    def should_update(self) -> bool:
        """Whether the last batch completes an update."""
        return self._completes(self._inner_count)

    def should_sync(self) -> bool:
        """Whether the next batch completes an update."""
        return self._completes(self._inner_count + 1)

    def _completes(self, count: int) -> bool:
        return count % self._counts == 0 or count == self._max_counts

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss divided by the number of batches of its update."""
        rest = self._max_counts % self._counts if self._max_counts > 0 else 0
        factor = rest if rest and self._inner_count >= self._max_counts - rest else self._counts
        return loss if factor == 1 else loss / factor

    # ---- attributes of the optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups; if there are several, followed by the optimizer's default settings."""
        extra = [] if self.base_param_settings is None else [self.base_param_settings]
        return [*self.optimizer.param_groups, *extra]

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's defaults."""
        return self.optimizer.defaults

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates: `lr` with one per group; with several groups also `base_lr`, the default one."""
        base = {} if self.base_param_settings is None else {"base_lr": [float(self.base_param_settings["lr"])]}
        return {**base, "lr": [float(group["lr"]) for group in self.optimizer.param_groups]}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return momenta, one per group; the first beta if the optimizer has betas."""
        groups = self.optimizer.param_groups
        return {"momentum": [float(g["momentum"] if "momentum" in g else g.get("betas", (0.0,))[0]) for g in groups]}


@OPTIM_WRAPPERS.register_module()
class OptimWrapper(BaseOptimWrapper):
    """Training in the dtype of the parameters."""


@OPTIM_WRAPPERS.register_module()
class AmpOptimWrapper(BaseOptimWrapper):
    """Mixed precision: 16-bit parameters and activations, fp32 weights for the optimizer."""

    def __init__(
        self,
        loss_scale: str | float | Mapping[str, Any] = "dynamic",
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        """`use_fsdp` has no effect: every strategy uses the same scaler."""
        super().__init__(**kwargs)
        name = str(dtype).removeprefix("torch.") if dtype is not None else None
        formats = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", None: "autocast"}
        if name not in formats:
            message = f"{name!r} is not a dtype of mixed precision"
            raise ConfigError(Problem("optim_wrapper.dtype", message, "Write 'float16', 'bfloat16' or 'float32'."))
        self.precision = {"compute": formats[name], "scaler": read_scale(loss_scale)}


def read_clip(clip_grad: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the keys of the section `train` of the run description for a `clip_grad`."""
    if clip_grad is None:
        return {}
    path = "optim_wrapper.clip_grad"
    options = dict(clip_grad)
    clip_type = options.pop("type", "norm")
    names = {"norm": ("max_norm", "clip_norm"), "value": ("clip_value", "clip_value")}
    if clip_type not in names:
        raise ConfigError(Problem(f"{path}.type", f"{clip_type!r}", "Write 'norm' or 'value'."))
    theirs, ours = names[clip_type]
    if theirs not in options:
        raise ConfigError(Problem(path, f"{dict(clip_grad)} has no `{theirs}`", f"Write dict({theirs}=1.0)."))
    limit = options.pop(theirs)
    if isinstance(limit, bool) or not isinstance(limit, float | int) or not limit > 0.0:
        message = f"{limit!r} is not a number above 0"
        raise ConfigError(Problem(f"{path}.{theirs}", message, f"Write dict({theirs}=1.0), or leave clip_grad out."))
    if float(options.pop("norm_type", 2)) != 2.0:
        message = f"{clip_grad['norm_type']!r}: only the 2-norm is supported"
        raise ConfigError(Problem(f"{path}.norm_type", message, "Leave it out."))
    options.pop("error_if_nonfinite", None)  # a step that is not finite is skipped on every rank and logged
    options.pop("foreach", None)
    if options:
        unknown = ", ".join(options)
        raise ConfigError(Problem(path, f"unknown keys: {unknown}", f"Write dict(type={clip_type!r}, {theirs}=1.0)."))
    return {ours: float(limit)}


def read_scale(loss_scale: str | float | Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `precision.scaler` of the run description for a `loss_scale`."""
    path = "optim_wrapper.loss_scale"
    # As torch's GradScaler: the scale halves at each overflow, and doubles after 2000 finite steps.
    usual: dict[str, Any] = {"initial_power": 16, "window": 2000, "hysteresis": 1, "minimum": 2.0**-24}
    if loss_scale == "dynamic":
        return usual
    if isinstance(loss_scale, float | int) and not isinstance(loss_scale, bool):
        return {"static": float(loss_scale)}
    if not isinstance(loss_scale, Mapping):
        raise ConfigError(Problem(path, f"{loss_scale!r}", "Write 'dynamic', a number or a dict."))
    options = dict(loss_scale)
    power = _power_of_two(options.pop("init_scale", 2.0**16), f"{path}.init_scale")
    usual |= {"initial_power": power, "window": int(options.pop("growth_interval", 2000))}
    for key, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5), ("enabled", True)):
        if (value := options.pop(key, fixed)) != fixed:
            raise ConfigError(Problem(f"{path}.{key}", f"{value!r}: the scaler doubles and halves", "Leave it out."))
    if options:
        remedy = "The keys are init_scale and growth_interval."
        raise ConfigError(Problem(path, f"unknown keys: {', '.join(options)}", remedy))
    return usual


def _power_of_two(value: float, path: str) -> int:
    power = round(torch.tensor(float(value)).log2().item())
    if 2.0**power != value or power < 0:
        raise ConfigError(Problem(path, f"{value!r} is not a power of two", "Write one, for example 65536."))
    return power


# Wrappers for certain strategies, and functions that raise errors for unsupported wrappers.


@OPTIM_WRAPPERS.register_module()
class DeepSpeedOptimWrapper(BaseOptimWrapper):
    """For `DeepSpeedStrategy`, whose configuration sets gradient accumulation and clipping."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)

    def accumulate(self, counts: int) -> None:
        """Set the batches per update, from `gradient_accumulation_steps` of the strategy."""
        self._counts = counts

    def initialize_count_status(self, model: Any, init_counts: int, max_counts: int) -> None:
        """Set the count of batches. As in DeepSpeed, an incomplete update at the end is dropped."""
        self._inner_count = init_counts


@OPTIM_WRAPPERS.register_module()
class ColossalAIOptimWrapper(BaseOptimWrapper):
    """For `ColossalAIStrategy`, which sets the precision itself."""

    def __init__(self, optimizer: Optimizer, accumulative_counts: int = 1) -> None:
        super().__init__(optimizer, accumulative_counts)


@OPTIM_WRAPPERS.register_module(name="ApexOptimWrapper")
def refuse_apex(**options: Any) -> NoReturn:
    """Raise `ConfigError` for Apex, which NVIDIA has replaced by torch's mixed precision."""
    message = "ApexOptimWrapper needs NVIDIA Apex's amp, which is not maintained any more"
    raise ConfigError(Problem("optim_wrapper.type", message, "Write type='AmpOptimWrapper': the same, by torch."))


@OPTIM_WRAPPERS.register_module(name="OptimWrapperDict")
def refuse_several(**options: Any) -> NoReturn:
    """Raise `ConfigError` for several optimizers of one model."""
    message = "several optimizers for one model are not supported"
    remedy = "Use one optimizer with `paramwise_cfg=dict(custom_keys=…)` for different rates."
    raise ConfigError(Problem("optim_wrapper.type", message, remedy))


# `optim_wrapper=dict(type=…, optimizer=dict(…), paramwise_cfg=…)`.


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
    """Return the wrapper that `cfg` describes, over the parameters of a model; `default` is its default type."""
    if isinstance(cfg, BaseOptimWrapper):
        return cfg
    if isinstance(cfg, Optimizer):
        return OptimWrapper(optimizer=cfg)
    if not isinstance(cfg, Mapping):
        message = f"a {type(cfg).__name__} is not an optim wrapper"
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
    """Builds the wrapper: with one group of all parameters, or with `paramwise_cfg` one group per parameter."""

    def __init__(self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None) -> None:
        self.optim_wrapper_cfg = dict(optim_wrapper_cfg)
        self.optimizer_cfg = self.optim_wrapper_cfg.pop("optimizer", None)
        self.paramwise_cfg = dict(paramwise_cfg or {})
        if self.optimizer_cfg is None:
            raise ConfigError(Problem("optim_wrapper.optimizer", "is missing", "Write optimizer=dict(type='AdamW')."))
        unknown = [key for key in self.paramwise_cfg if key not in _PARAMWISE]
        if unknown:
            path = "optim_wrapper.paramwise_cfg"
            raise ConfigError(
                [Problem(f"{path}.{key}", "unknown key", choose(key, _PARAMWISE, "key")) for key in unknown]
            )

    def __call__(self, model: nn.Module) -> BaseOptimWrapper:
        """Return the wrapper over a model's parameters."""
        optimizer = self.optimizer_cfg
        if isinstance(optimizer, Mapping):
            params: Any = list(self.groups(model)) if self.paramwise_cfg else list(model.parameters())
            optimizer = OPTIMIZERS.build(optimizer, default_args={"params": params})
        made = OPTIM_WRAPPERS.build(self.optim_wrapper_cfg, default_args={"optimizer": optimizer})
        if not isinstance(made, BaseOptimWrapper):
            message = f"a {type(made).__name__} updates parameters itself, which only the engine may"
            remedy = "Derive it from plait.frontends.mmengine.OptimWrapper."
            raise ConfigError(Problem("optim_wrapper.type", message, remedy))
        return made

    def groups(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Yield a group for each trainable parameter, with its settings of `paramwise_cfg`."""
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
        # The longest matching key is used; of equally long ones the first in alphabetical order.
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
            message = f"multiplies the optimizer's `{what}`, which is not set"
            raise ConfigError(
                Problem(f"optim_wrapper.paramwise_cfg.{key}", message, f"Write optimizer=dict({what}=…).")
            )
        return float(self.optimizer_cfg[what])


def scale_rates(runner: Any, wrapper: Any, cfg: Mapping[str, Any]) -> None:
    """Multiply learning rates by the total batch size divided by `base_batch_size`, if `enable` is set."""
    unknown = [key for key in cfg if key not in ("base_batch_size", "enable")]
    if unknown:
        remedy = "The keys are base_batch_size and enable."
        raise ConfigError(Problem(f"auto_scale_lr.{unknown[0]}", "unknown key", remedy))
    if not cfg.get("enable", False):
        return
    if "base_batch_size" not in cfg:
        remedy = "Write the total batch size that the learning rate was tuned for."
        raise ConfigError(Problem("auto_scale_lr.base_batch_size", "is missing", remedy))
    ratio = runner.batch_total / float(cfg["base_batch_size"])
    for group in wrapper.param_groups:
        group["lr"] = group["lr"] * ratio
    runner.logger.info(f"learning rates are scaled by {ratio:g}: a batch has {runner.batch_total} samples")
