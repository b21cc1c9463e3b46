"""How training is spread, in MMEngine's words."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

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
from plait.torch_internals import module_wrap_classes

Reader = KeyReader[TranslatedSettings]

# Strategies: each translates its options into sections of a run description, with a report.


class BaseStrategy(ABC):
    """Options of one way to spread training."""

    default_wrapper = "OptimWrapper"
    """The type of an optim wrapper that names none."""
    own_wrapper = False
    """Whether only that type goes with it."""
    skip_init_weights = False
    sync_bn: str | None = None

    def __init__(self, *, auto_scale_lr: Mapping[str, Any] | None = None) -> None:
        """`auto_scale_lr` as of the runner."""
        self.auto_scale_lr = auto_scale_lr

    @abstractmethod
    def translate(self, world_size: int) -> Translation:
        """The sections that these options ask for, and what became of each of them."""


@STRATEGIES.register_module()
class SingleDeviceStrategy(BaseStrategy):
    """One process."""

    def translate(self, world_size: int) -> Translation:
        """One copy, on one rank."""
        settings = TranslatedSettings()
        settings.set("strategy.layout", {"dp_replicate": 1, "dp_shard": 1})
        return settings.translation()


_WHOLE = "gradients are collected in buckets that are reduced in one order on all ranks, whatever takes part"
_WRAPPER: dict[str, Reader] = {
    "type": unneeded("the model is not wrapped: its gradients are collected from outside"),
    "bucket_cap_mb": honoured_as("strategy.bucket_mb", float),
    "find_unused_parameters": unneeded(_WHOLE),
    "static_graph": unneeded(_WHOLE),
    "gradient_as_bucket_view": unneeded("it always is one, where formats allow it"),
    "broadcast_buffers": unneeded("buffers are averaged before each validation and each checkpoint"),
    "exclude_norm_params": unneeded("which parameters share a bucket does not change the sums"),
    "dim": unneeded("a rank has one device"),
    "device_ids": unneeded("a rank has one device"),
    "output_device": unneeded("a rank has one device"),
    "process_group": refused_unless("the groups follow from strategy.layout: leave it out"),
    "detect_anomalous_params": refused_unless("a parameter without a gradient is no error here: leave it out", False),
}


@STRATEGIES.register_module()
class DDPStrategy(BaseStrategy):
    """A whole copy on every rank; gradients are averaged."""

    def __init__(
        self, *, model_wrapper: Mapping[str, Any] | None = None, sync_bn: str | None = None, **kwargs: Any
    ) -> None:
        """`sync_bn='torch'` turns batch norms into ones that see the batch of all ranks; needs CUDA."""
        super().__init__(**kwargs)
        if sync_bn not in (None, "torch"):
            message = f"{sync_bn!r} is not offered"
            raise ConfigError(Problem("strategy.sync_bn", message, "Write 'torch': the same, by torch itself."))
        self.sync_bn = sync_bn
        self._wrapper = dict(model_wrapper or {})

    def translate(self, world_size: int) -> Translation:
        """Stage 0."""
        settings = TranslatedSettings()
        settings.set("strategy.zero", 0)
        settings.read(self._wrapper, _WRAPPER, "strategy.model_wrapper")
        return settings.translation()


# `ColossalAIStrategy`: its plugins are stages of ZeRO, which the engine here has too.


_CHUNKS = "parameters are gathered block by block, not in chunks of a searched size"
_BUCKETS = "gradients are reduced block by block, not in buckets"
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
        settings.unneeded(key, value, "what is offloaded, `strategy.offload` says")
    elif value == "cpu":
        settings.set("strategy.offload", {"optimizer": "cpu", "params": "cpu"})
        settings.mapped(key, value, "strategy.offload: parameters and optimizer in host memory")
    else:
        settings.refused(key, value, "memory is not moved by watching it: write 'cuda' or 'cpu'")


_SHARED: dict[str, Reader] = {
    "precision": _format,
    "initial_scale": _initial_scale,
    "growth_interval": honoured_as("precision.scaler.window", int),
    "hysteresis": honoured_as("precision.scaler.hysteresis", int),
    "min_scale": honoured_as("precision.scaler.minimum", float),
    "growth_factor": refused_unless("the scale doubles: leave it out", 2, 2.0),
    "backoff_factor": refused_unless("the scale halves: leave it out", 0.5),
    "max_scale": unneeded("the scale ends where gradients overflow"),
    "max_norm": honoured_as("train.clip_norm", float),
    "norm_type": refused_unless("gradients are measured by their 2-norm", 2, 2.0),
    "verbose": unneeded("what happens is in the log"),
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
        "force_outputs_fp32": unneeded("losses are in fp32 in any case"),
        "strict_ddp_mode": unneeded("gradients are summed in one order on all ranks"),
        "enable_gradient_accumulation": unneeded("`optim_wrapper.accumulative_counts` says it"),
        "shard_param_frac": refused_unless("parameters are sharded whole", 1, 1.0),
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
            remedy = "ColossalAI itself no longer reads one: leave it out"
            settings.refused("strategy.config", self._config, remedy)
        if self._wrapper is not None:
            text = "the model is not wrapped: its blocks are sharded in place"
            settings.unneeded("strategy.model_wrapper", self._wrapper, text)
        return settings.translation()


# `DeepSpeedStrategy`: the keys of a ds_config, translated where the DeepSpeed front end translates them.


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
        """Translate the keys with the DeepSpeed front end."""
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


# `FSDPStrategy`: torch's FullyShardedDataParallel, in the words of its first version.


_SIZE = 10**8
"""What torch's own policy takes where it is told nothing."""
_SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _policy(settings: TranslatedSettings, key: str, value: Any) -> None:
    policy, options = _taken_apart(value)
    # By name: importing torch's own would load much that a run without it does not need.
    policy_type = type(policy).__name__
    name = getattr(policy, "__name__", str(policy)).rpartition(".")[2]
    if policy is None:
        settings.unneeded(key, value, "the units are the model's own blocks")
    elif name == "size_based_auto_wrap_policy":
        least = int(options.get("min_num_params", _SIZE))
        settings.set("strategy.wrap.min_params", least)
        settings.honoured(key, value, f"strategy.wrap.min_params: {least}")
    elif policy_type == "ModuleWrapPolicy" or name == "transformer_auto_wrap_policy":
        classes = (
            module_wrap_classes(policy)
            if policy_type == "ModuleWrapPolicy"
            else options.get("transformer_layer_cls", ())
        )
        names = sorted(policy_type if isinstance(policy_type, str) else policy_type.__name__ for policy_type in classes)
        settings.set("strategy.wrap.classes", names)
        settings.honoured(key, value, f"strategy.wrap.classes: {', '.join(names)}")
    else:
        remedy = "units are found by size or by class: size_based_auto_wrap_policy or transformer_auto_wrap_policy"
        settings.refused(key, value, remedy)


def _taken_apart(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """A policy and its options, given as a function, a partial, a name, or a dict with a type."""
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
        text = "buffers keep their format: running statistics need it"
        settings.mapped(f"{key}.buffer_dtype", given["buffer_dtype"], text)
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        if name in given:
            text = "inputs are cast once, gradients are summed in `precision.reduce`"
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


_GROUP = "the groups follow from strategy.layout: leave it out"
_FSDP_WRAPPER: dict[str, Reader] = {
    "type": unneeded("`fully_shard`, the second version of FSDP, does the work; the model is not wrapped"),
    "auto_wrap_policy": _policy,
    "sharding_strategy": _sharding,
    "mixed_precision": _mixed,
    "cpu_offload": _offload,
    "forward_prefetch": _forward_prefetch,
    "backward_prefetch": unneeded("`fully_shard` gathers the next unit ahead in the backward pass by itself"),
    "use_orig_params": unneeded("parameters always keep their names and objects"),
    "limit_all_gathers": unneeded("`fully_shard` holds at most two units at a time by itself"),
    "sync_module_states": unneeded("all ranks always start from rank 0's values"),
    "device_id": unneeded("a rank has one device"),
    "process_group": refused_unless(_GROUP),
    "device_mesh": refused_unless(_GROUP),
    "param_init_fn": refused_unless("give values in the model's `init_weights`"),
    "ignored_modules": refused_unless("every parameter is sharded; a module that must not be can be frozen"),
    "ignored_parameters": refused_unless("every parameter is sharded"),
    "ignored_states": refused_unless("every parameter is sharded"),
}


@STRATEGIES.register_module()
class FSDPStrategy(BaseStrategy):
    """Parameters, gradients and optimizer spread over the ranks."""

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
        """`state_dict_cfg` is accepted: a checkpoint is written in parts, and reads as a whole."""
        super().__init__(**kwargs)
        self.skip_init_weights = skip_init_weights
        self.sync_bn = sync_bn
        self._wrapper = dict(model_wrapper or {})
        self._state_dict_cfg = state_dict_cfg
        self._recompute = activation_checkpointing

    def translate(self, world_size: int) -> Translation:
        """Stage 3, unless `sharding_strategy` says otherwise."""
        settings = TranslatedSettings()
        settings.read(self._wrapper, _FSDP_WRAPPER, "strategy.model_wrapper")
        if "sharding" not in settings.sections.get("strategy", {}):
            settings.set("strategy.sharding", "FULL_SHARD")
        text = "each rank writes its part, and any number of ranks reads the whole"
        settings.unneeded("strategy.state_dict_cfg", self._state_dict_cfg, text)
        if self._recompute is not None:
            self._recompute_units(settings, dict(self._recompute))
        return settings.translation()

    def _recompute_units(self, settings: TranslatedSettings, given: dict[str, Any]) -> None:
        key = "strategy.activation_checkpointing"
        if given.get("check_fn") is not None:
            remedy = "blocks are chosen by strategy.model_wrapper.auto_wrap_policy: leave it out"
            settings.refused(f"{key}.check_fn", given["check_fn"], remedy)
            return
        settings.set("strategy.recompute", "full")
        settings.mapped(key, given, "strategy.recompute: full")
