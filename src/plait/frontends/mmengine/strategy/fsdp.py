"""`FSDPStrategy`: torch's FullyShardedDataParallel, in the words of its first version."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from plait.frontends import Answer, Translation
from plait.frontends.mmengine.registry import STRATEGIES
from plait.frontends.mmengine.strategy.base import BaseStrategy
from plait.frontends.mmengine.strategy.table import Row, Sheet, refused, unneeded
from plait.torch_internals import module_wrap_classes

_SIZE = 10**8
"""What torch's own policy takes where it is told nothing."""
_WORDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _policy(sheet: Sheet, key: str, value: Any) -> None:
    policy, options = _taken_apart(value)
    # By name: importing torch's own would load much that a run without it does not need.
    kind = type(policy).__name__
    name = getattr(policy, "__name__", str(policy)).rpartition(".")[2]
    if policy is None:
        sheet.account.add(Answer.UNNEEDED, key, value, "the units are the model's own blocks")
    elif name == "size_based_auto_wrap_policy":
        least = int(options.get("min_num_params", _SIZE))
        sheet.put("strategy.wrap.min_params", least)
        sheet.account.add(Answer.HONOURED, key, value, f"strategy.wrap.min_params: {least}")
    elif kind == "ModuleWrapPolicy" or name == "transformer_auto_wrap_policy":
        kinds = module_wrap_classes(policy) if kind == "ModuleWrapPolicy" else options.get("transformer_layer_cls", ())
        names = sorted(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
        sheet.put("strategy.wrap.classes", names)
        sheet.account.add(Answer.HONOURED, key, value, f"strategy.wrap.classes: {', '.join(names)}")
    else:
        remedy = "units are found by size or by class: size_based_auto_wrap_policy or transformer_auto_wrap_policy"
        sheet.account.add(Answer.REFUSED, key, value, remedy)


def _taken_apart(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """A policy and its options, given as a function, a partial, a name, or a dict with a type."""
    if isinstance(value, functools.partial):
        return value.func, value.keywords
    if isinstance(value, Mapping):
        return value.get("type"), {key: item for key, item in value.items() if key != "type"}
    return value, {}


def _sharding(sheet: Sheet, key: str, value: Any) -> None:
    word = getattr(value, "name", str(value)).rpartition(".")[2]
    if word not in _WORDS:
        sheet.account.add(Answer.REFUSED, key, value, f"write one of {', '.join(_WORDS)}")
        return
    sheet.put("strategy.sharding", word)
    sheet.account.add(Answer.HONOURED, key, value, f"strategy.sharding: {word}")


def _mixed(sheet: Sheet, key: str, value: Any) -> None:
    if value is None:
        return
    given = dict(value) if isinstance(value, Mapping) else dict(vars(value))
    for name, path in (("param_dtype", "precision.compute"), ("reduce_dtype", "precision.reduce")):
        dtype = given.get(name)
        if dtype is None:
            continue
        word = _FORMATS.get(str(dtype).removeprefix("torch."))
        if word is None:
            sheet.account.add(Answer.REFUSED, f"{key}.{name}", dtype, f"write one of {', '.join(_FORMATS)}")
            continue
        sheet.put(path, word)
        sheet.account.add(Answer.HONOURED, f"{key}.{name}", dtype, f"{path}: {word}")
    if given.get("buffer_dtype") is not None:
        text = "buffers keep their format: running statistics need it"
        sheet.account.add(Answer.MAPPED, f"{key}.buffer_dtype", given["buffer_dtype"], text)
    for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
        if name in given:
            text = "inputs are cast once, gradients are summed in `precision.reduce`"
            sheet.account.add(Answer.UNNEEDED, f"{key}.{name}", given[name], text)


def _offload(sheet: Sheet, key: str, value: Any) -> None:
    wanted = getattr(value, "offload_params", value.get("offload_params") if isinstance(value, Mapping) else value)
    if wanted:
        sheet.put("strategy.offload", {"optimizer": "cpu", "params": "cpu"})
        sheet.account.add(Answer.MAPPED, key, value, "strategy.offload: parameters and optimizer in host memory")
    else:
        sheet.account.add(Answer.UNNEEDED, key, value, "nothing is offloaded")


def _forward_prefetch(sheet: Sheet, key: str, value: Any) -> None:
    if value:
        sheet.put("strategy.forward_prefetch", 1)
    sheet.account.add(Answer.HONOURED, key, value, f"strategy.forward_prefetch: {int(bool(value))}")


_GROUP = "the groups follow from strategy.layout: leave it out"
_WRAPPER: dict[str, Row] = {
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
    "process_group": refused(_GROUP),
    "device_mesh": refused(_GROUP),
    "param_init_fn": refused("give values in the model's `init_weights`"),
    "ignored_modules": refused("every parameter is sharded; a module that must not be can be frozen"),
    "ignored_parameters": refused("every parameter is sharded"),
    "ignored_states": refused("every parameter is sharded"),
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
        sheet = Sheet()
        sheet.walk("strategy.model_wrapper", self._wrapper, _WRAPPER)
        if "sharding" not in sheet.sections.get("strategy", {}):
            sheet.put("strategy.sharding", "FULL_SHARD")
        text = "each rank writes its part, and any number of ranks reads the whole"
        sheet.account.add(Answer.UNNEEDED, "strategy.state_dict_cfg", self._state_dict_cfg, text)
        if self._recompute is not None:
            self._recompute_units(sheet, dict(self._recompute))
        return Translation(sheet.sections, sheet.account)

    def _recompute_units(self, sheet: Sheet, given: dict[str, Any]) -> None:
        key = "strategy.activation_checkpointing"
        if given.get("check_fn") is not None:
            remedy = "blocks are chosen by strategy.model_wrapper.auto_wrap_policy: leave it out"
            sheet.account.add(Answer.REFUSED, f"{key}.check_fn", given["check_fn"], remedy)
            return
        sheet.put("strategy.recompute", "full")
        sheet.account.add(Answer.MAPPED, key, given, "strategy.recompute: full")
