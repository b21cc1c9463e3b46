"""MMEngine's strategies, translated into a run description."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from plait.distributed import module_wrap_classes
from plait.errors import ConfigError, Problem
from plait.frontends import (
    KeyReader,
    TranslatedSettings,
    Translation,
    honoured_as,
    refused_unless,
    unneeded,
)
from plait.frontends.deepspeed import read_config, translate
from plait.frontends.mmengine.registry import STRATEGIES

Reader = KeyReader[TranslatedSettings]

# Each strategy translates its options into a run description, and reports the outcome of each.


class BaseStrategy(ABC):
    """The base class of strategies: holds the options of one, and translates them."""

    default_wrapper = "OptimWrapper"
    """The default type of the optim wrapper."""
    requires_default_wrapper = False
    """Whether the optim wrapper must be of the type `default_wrapper`."""
    skip_init_weights = False
    sync_bn: str | None = None

    def __init__(self, *, auto_scale_lr: Mapping[str, Any] | None = None) -> None:
        """`auto_scale_lr`: the same as the runner's argument of this name."""
        self.auto_scale_lr = auto_scale_lr

    @abstractmethod
    def translate(self, world_size: int) -> Translation:
        """Return the run description of these options, and the outcome of each."""


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy):
    """Training in one process."""

    def translate(self, world_size: int) -> Translation:
        """Return the translation: one rank without sharding."""
        settings = TranslatedSettings()
        settings.set("strategy.layout", {"dp_replicate": 1, "dp_shard": 1})
        return settings.translation()


_UNUSED = "unused parameters are handled: all ranks reduce their gradient buckets in the same order"
_WRAPPER: dict[str, Reader] = {
    "type": unneeded("the model is not wrapped: hooks on its parameters reduce the gradients"),
    "bucket_cap_mb": honoured_as("strategy.bucket_mb", float),
    "find_unused_parameters": unneeded(_UNUSED),
    "static_graph": unneeded(_UNUSED),
    "gradient_as_bucket_view": unneeded("gradients always are bucket views, if dtypes allow it"),
    "broadcast_buffers": unneeded("buffers are averaged before each validation and each checkpoint"),
    "exclude_norm_params": unneeded("how parameters share buckets does not change the result"),
    "dim": unneeded("a rank has one device"),
    "device_ids": unneeded("a rank has one device"),
    "output_device": unneeded("a rank has one device"),
    "process_group": refused_unless("process groups follow from strategy.layout: leave it out"),
    "detect_anomalous_params": refused_unless("a parameter without a gradient is not an error: leave it out", False),
}


@STRATEGIES.register_module()
class DDPStrategy(BaseStrategy):
    """DDP: a replica of the model on every rank; gradients are averaged."""

    def __init__(
        self, *, model_wrapper: Mapping[str, Any] | None = None, sync_bn: str | None = None, **kwargs: Any
    ) -> None:
        """`sync_bn='torch'` synchronizes batch norm statistics over ranks; needs CUDA."""
        super().__init__(**kwargs)
        if sync_bn not in (None, "torch"):
            message = f"{sync_bn!r} is not supported"
            raise ConfigError(Problem("strategy.sync_bn", message, "Write 'torch', which does the same."))
        self.sync_bn = sync_bn
        self._wrapper = dict(model_wrapper or {})

    def translate(self, world_size: int) -> Translation:
        """Return the translation: ZeRO stage 0."""
        settings = TranslatedSettings()
        settings.set("strategy.zero", 0)
        settings.read(self._wrapper, _WRAPPER, "strategy.model_wrapper")
        return settings.translation()


# `ColossalAIStrategy`: its plugins are translated to ZeRO stages.


_CHUNKS = "parameters are gathered per block, not in chunks"
_BUCKETS = "gradients are reduced per block, not in buckets"
_COLOSSALAI_FORMATS = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32"}


def _format(settings: TranslatedSettings, key: str, value: Any) -> None:
    name = value.get("type", "") if isinstance(value, Mapping) else str(value)
    if name in ("fp16_apex", "fp16_naive"):
        settings.set("precision.compute", "fp16")
        settings.mapped(key, value, "precision.compute: fp16, by torch and not by Apex")
    elif name in _COLOSSALAI_FORMATS:
        settings.set("precision.compute", _COLOSSALAI_FORMATS[name])
        settings.honoured(key, value, f"precision.compute: {name}")
    else:
        settings.refused(key, value, f"write one of {', '.join(_COLOSSALAI_FORMATS)}")


def _initial_scale(settings: TranslatedSettings, key: str, value: Any) -> None:
    power = math.log2(value) if value > 0 else -1.0
    if power < 0 or power != int(power):
        settings.refused(key, value, "write a power of two")
        return
    settings.set("precision.scaler.initial_power", int(power))
    settings.honoured(key, value, f"precision.scaler.initial_power: {int(power)}")


def _stage(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value not in (1, 2):
        settings.refused(key, value, "LowLevelZeroPlugin has stages 1 and 2; stage 3 is 'gemini'")
        return
    settings.set("strategy.zero", int(value))
    settings.honoured(key, value, f"strategy.zero: {value}")


def _colossalai_offload(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value:
        settings.set("strategy.offload.optimizer", "cpu")
        settings.mapped(key, value, "strategy.offload.optimizer: cpu")
    else:
        settings.unneeded(key, value, "nothing is offloaded")


def _placement(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value in ("cuda", "static"):
        settings.unneeded(key, value, "offloading is set by `strategy.offload`")
    elif value == "cpu":
        settings.set("strategy.offload", {"optimizer": "cpu", "params": "cpu"})
        settings.mapped(key, value, "strategy.offload: parameters and optimizer in host memory")
    else:
        settings.refused(key, value, "placement by memory use is not supported: write 'cuda' or 'cpu'")


_SHARED: dict[str, Reader] = {
    "precision": _format,
    "initial_scale": _initial_scale,
    "growth_interval": honoured_as("precision.scaler.window", int),
    "hysteresis": honoured_as("precision.scaler.hysteresis", int),
    "min_scale": honoured_as("precision.scaler.minimum", float),
    "growth_factor": refused_unless("the scale doubles: leave it out", 2, 2.0),
    "backoff_factor": refused_unless("the scale halves: leave it out", 0.5),
    "max_scale": unneeded("the loss scale stops growing when gradients overflow"),
    "max_norm": honoured_as("train.clip_norm", float),
    "norm_type": refused_unless("only the 2-norm is supported", 2, 2.0),
    "verbose": unneeded("events are logged in any case"),
    "overlap_communication": unneeded("reducing always overlaps with the backward pass"),
}
_PLUGINS: dict[str, dict[str, Reader]] = {
    "GeminiPlugin": {
        **_SHARED,
        **dict.fromkeys(
            ("chunk_config_dict", "chunk_init_device", "search_range_m", "hidden_dim", "min_chunk_size_m", "memstats"),
            unneeded(_CHUNKS),
        ),
        "placement_policy": _placement,
        "pin_memory": unneeded("host memory is page-locked wherever the device can use it"),
        "force_outputs_fp32": unneeded("losses are always in fp32"),
        "strict_ddp_mode": unneeded("gradients are always summed in the same order on all ranks"),
        "enable_gradient_accumulation": unneeded("set by `optim_wrapper.accumulative_counts`"),
        "shard_param_frac": refused_unless("all of a parameter is sharded", 1, 1.0),
        "offload_optim_frac": refused_unless("write placement_policy='cpu' for all of it", 0, 0.0),
        "offload_param_frac": refused_unless("write placement_policy='cpu' for all of it", 0, 0.0),
        "tp_size": honoured_as("strategy.layout.tp", int),
    },
    "LowLevelZeroPlugin": {
        **_SHARED,
        "stage": _stage,
        "cpu_offload": _colossalai_offload,
        "reduce_bucket_size_in_m": unneeded(_BUCKETS),
        "communication_dtype": refused_unless("write precision 'bf16' or 'fp16'; sums are in fp32"),
        "partition_grad": refused_unless("that is stage 2: write stage=2", False),
    },
}
_NAMES = {"gemini": "GeminiPlugin", "lowlevel-zero": "LowLevelZeroPlugin"}


@STRATEGIES.register_module()
class ColossalAIStrategy(BaseStrategy):
    """ColossalAI: plugin gemini is ZeRO stage 3, lowlevel-zero stage 1 or 2; the default precision is fp16."""

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
        """Return the translation of the plugin, with ColossalAI's defaults."""
        settings = TranslatedSettings()
        given = {"type": self._plugin} if isinstance(self._plugin, str) else dict(self._plugin)
        name = str(given.pop("type", "gemini"))
        plugin = _NAMES.get(name, name)
        key = "strategy.plugin"
        if plugin not in _PLUGINS:
            settings.refused(key, name, f"write one of {', '.join((*_NAMES, *_PLUGINS))}")
            return settings.translation()
        stage = 3 if plugin == "GeminiPlugin" else 1
        settings.set("strategy.zero", stage)
        settings.set("precision.compute", "fp16")
        settings.set("precision.scaler", {"initial_power": 16 if stage == 3 else 32, "window": 1000})
        settings.mapped(key, name, f"strategy.zero: {stage}, in fp16 unless `precision` says another")
        settings.read(given, _PLUGINS[plugin], key)
        if self._mixed is not None:
            _format(settings, "strategy.mixed_precision", self._mixed)
        if settings.sections["precision"]["compute"] != "fp16":
            del settings.sections["precision"]["scaler"]
        if self._config is not None:
            remedy = "ColossalAI no longer reads it: leave it out"
            settings.refused("strategy.config", self._config, remedy)
        if self._wrapper is not None:
            text = "the model is not wrapped: its blocks are sharded in place"
            settings.unneeded("strategy.model_wrapper", self._wrapper, text)
        return settings.translation()


# `DeepSpeedStrategy`: the keys of a ds_config, translated by the DeepSpeed front end.


_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_SINKS = "values go to the `visualizer`: write vis_backends=[dict(type='TensorboardVisBackend')]"
_RUNNERS = {
    "optimizer": "the optimizer is set by `optim_wrapper`: leave it out",
    "scheduler": "schedules are set by `param_scheduler`: leave it out",
}


@STRATEGIES.register_module()
class DeepSpeedStrategy(BaseStrategy):
    """DeepSpeed's configuration: a file or dict as `config`, and single keys that override it."""

    default_wrapper = "DeepSpeedOptimWrapper"
    requires_default_wrapper = True

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
        """Return the translation of the keys by the DeepSpeed front end."""
        monitors = [key for key in _MONITORS if dict(self._keys.get(key) or {}).get("enabled")]
        keys = {key: value for key, value in self._keys.items() if key not in (*_RUNNERS, *monitors)}
        translation = translate(keys, world_size=world_size)
        settings = TranslatedSettings()
        settings.sections.update(translation.sections)
        settings.report.entries += translation.report.entries
        for key, remedy in {**_RUNNERS, **dict.fromkeys(monitors, _SINKS)}.items():
            if key in self._keys:
                settings.refused(f"strategy.{key}", self._keys[key], remedy)
        if self._half is not None:
            if settings.get("precision.compute") not in (None, "fp32"):
                settings.set("precision.cast_inputs", True)
            text = "precision.cast_inputs: every floating-point input is cast, these among them"
            settings.mapped("strategy.inputs_to_half", self._half, text)
        if self._exclude:
            remedy = "a checkpoint holds all parameters: leave it out"
            settings.refused("strategy.exclude_frozen_parameters", self._exclude, remedy)
        return settings.translation()


# `FSDPStrategy`: the arguments of torch's FullyShardedDataParallel (FSDP 1).


_SIZE = 10**8
"""The default of `min_num_params` of torch's size-based wrap policy."""
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _policy(settings: TranslatedSettings, key: str, value: Any) -> None:
    policy, options = _split_policy(value)
    # Compared by name: importing torch's class would load modules that other runs do not need.
    policy_type = type(policy).__name__
    name = getattr(policy, "__name__", str(policy)).rpartition(".")[2]
    if policy is None:
        settings.unneeded(key, value, "the model's own blocks are wrapped")
    elif name == "size_based_auto_wrap_policy":
        least = int(options.get("min_num_params", _SIZE))
        settings.set("strategy.wrap.min_params", least)
        settings.honoured(key, value, f"strategy.wrap.min_params: {least}")
    elif policy_type == "ModuleWrapPolicy" or name == "transformer_auto_wrap_policy":
        named = policy_type == "ModuleWrapPolicy"
        classes = module_wrap_classes(policy) if named else options.get("transformer_layer_cls", ())
        names = sorted(cls if isinstance(cls, str) else cls.__name__ for cls in classes)
        settings.set("strategy.wrap.classes", names)
        settings.honoured(key, value, f"strategy.wrap.classes: {', '.join(names)}")
    else:
        remedy = "write size_based_auto_wrap_policy or transformer_auto_wrap_policy"
        settings.refused(key, value, remedy)


def _split_policy(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a policy and its options from a function, a partial, a name, or a dict with a type."""
    if isinstance(value, functools.partial):
        return value.func, value.keywords
    if isinstance(value, Mapping):
        return value.get("type"), {key: item for key, item in value.items() if key != "type"}
    return value, {}


def _sharding(settings: TranslatedSettings, key: str, value: Any) -> None:
    name = getattr(value, "name", str(value)).rpartition(".")[2]
    if name not in _SHARDING_STRATEGIES:
        settings.refused(key, value, f"write one of {', '.join(_SHARDING_STRATEGIES)}")
        return
    settings.set("strategy.sharding", name)
    settings.honoured(key, value, f"strategy.sharding: {name}")


def _mixed(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value is None:
        return
    given = dict(value) if isinstance(value, Mapping) else dict(vars(value))
    for name, path in (("param_dtype", "precision.compute"), ("reduce_dtype", "precision.reduce")):
        dtype = given.get(name)
        if dtype is None:
            continue
        dtype_name = _FORMATS.get(str(dtype).removeprefix("torch."))
        if dtype_name is None:
            settings.refused(f"{key}.{name}", dtype, f"write one of {', '.join(_FORMATS)}")
            continue
        settings.set(path, dtype_name)
        settings.honoured(f"{key}.{name}", dtype, f"{path}: {dtype_name}")
    if given.get("buffer_dtype") is not None:
        text = "buffers keep their dtype: running statistics need it"
        settings.mapped(f"{key}.buffer_dtype", given["buffer_dtype"], text)
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        if name in given:
            text = "inputs are cast once, gradients are reduced in `precision.reduce`"
            settings.unneeded(f"{key}.{name}", given[name], text)


def _offload(settings: TranslatedSettings, key: str, value: Any) -> None:
    wanted = getattr(value, "offload_params", value.get("offload_params") if isinstance(value, Mapping) else value)
    if wanted:
        settings.set("strategy.offload", {"optimizer": "cpu", "params": "cpu"})
        settings.mapped(key, value, "strategy.offload: parameters and optimizer in host memory")
    else:
        settings.unneeded(key, value, "nothing is offloaded")


def _forward_prefetch(settings: TranslatedSettings, key: str, value: Any) -> None:
    if value:
        settings.set("strategy.forward_prefetch", 1)
    settings.honoured(key, value, f"strategy.forward_prefetch: {int(bool(value))}")


_GROUP = "process groups follow from strategy.layout: leave it out"
_FSDP_WRAPPER: dict[str, Reader] = {
    "type": unneeded("`fully_shard` (FSDP 2) is used, which does not wrap the model"),
    "auto_wrap_policy": _policy,
    "sharding_strategy": _sharding,
    "mixed_precision": _mixed,
    "cpu_offload": _offload,
    "forward_prefetch": _forward_prefetch,
    "backward_prefetch": unneeded("`fully_shard` always prefetches in the backward pass"),
    "use_orig_params": unneeded("parameters always keep their names and objects"),
    "limit_all_gathers": unneeded("`fully_shard` always limits all-gathers"),
    "sync_module_states": unneeded("all ranks always start from rank 0's values"),
    "device_id": unneeded("a rank has one device"),
    "process_group": refused_unless(_GROUP),
    "device_mesh": refused_unless(_GROUP),
    "param_init_fn": refused_unless("initialize in the model's `init_weights`"),
    "ignored_modules": refused_unless("every parameter is sharded; freeze modules that must not be trained"),
    "ignored_parameters": refused_unless("every parameter is sharded"),
    "ignored_states": refused_unless("every parameter is sharded"),
}


@STRATEGIES.register_module()
class FSDPStrategy(BaseStrategy):
    """FSDP: parameters, gradients and optimizer states are sharded over ranks."""

    def __init__(
        self,
        *,
        model_wrapper: Mapping[str, Any] | None = None,
        skip_init_weights: bool = False,
        state_dict_cfg: str | Mapping[str, Any] = "local",
        activation_checkpointing: Mapping[str, Any] | None = None,
        sync_bn: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`state_dict_cfg` has no effect: checkpoints are sharded, and load on any number of ranks."""
        super().__init__(**kwargs)
        self.skip_init_weights = skip_init_weights
        self.sync_bn = sync_bn
        self._wrapper = dict(model_wrapper or {})
        self._state_dict_cfg = state_dict_cfg
        self._recompute = activation_checkpointing

    def translate(self, world_size: int) -> Translation:
        """Return the translation: FULL_SHARD, or the `sharding_strategy` of `model_wrapper`."""
        settings = TranslatedSettings()
        settings.read(self._wrapper, _FSDP_WRAPPER, "strategy.model_wrapper")
        if "sharding" not in settings.sections.get("strategy", {}):
            settings.set("strategy.sharding", "FULL_SHARD")
        text = "each rank writes its shard, and checkpoints load on any number of ranks"
        settings.unneeded("strategy.state_dict_cfg", self._state_dict_cfg, text)
        if self._recompute is not None:
            self._recompute_blocks(settings, dict(self._recompute))
        return settings.translation()

    def _recompute_blocks(self, settings: TranslatedSettings, given: dict[str, Any]) -> None:
        key = "strategy.activation_checkpointing"
        if given.get("check_fn") is not None:
            remedy = "blocks are selected by strategy.model_wrapper.auto_wrap_policy: leave it out"
            settings.refused(f"{key}.check_fn", given["check_fn"], remedy)
            return
        settings.set("strategy.recompute", "full")
        settings.mapped(key, given, "strategy.recompute: full")
