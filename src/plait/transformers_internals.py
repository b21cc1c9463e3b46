"""All private names of transformers that Plait uses; no other file uses any.

`CHECKED` are the releases with which all of them were tested (`make matrix`). Using a name that a release does not have
raises an `UnsupportedVersionError` with that name; see [Note: private names are refused by name],
`plait/torch_internals.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

from torch import Tensor, nn

from plait.errors import UnsupportedVersionError

CHECKED = ("5.0", "5.12", "5.23")
"""The releases of transformers with which every name was tested."""

ATTRIBUTES = {
    "transformers.PreTrainedModel._no_split_modules": "the repeated units of a model",
    "transformers.PreTrainedModel._tp_plan": "tensor parallelism",
    "transformers.PreTrainedModel._pp_plan": "pipeline stages",
    "transformers.PreTrainedModel._init_weights": "initial values, module by module",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_missing": "weights that a file may lack",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": "weights that a file may have in addition",
    "transformers.PreTrainedModel._is_fsdp_managed_module": "generation without waiting for other ranks",
    "torch.Tensor._is_hf_initialized": "initial values, module by module",
    "transformers.PretrainedConfig._attn_implementation": "context parallelism, packed documents",
    "transformers.PreTrainedModel._keys_to_ignore_on_save": "weights that are not written",
    "transformers.conversion_mapping": "weights under the names and in the shapes of files",
    "transformers.core_model_loading": "weights under the names and in the shapes of files",
}
"""The private attributes, and what each is used for."""

_Class = TypeVar("_Class", bound=type)


def _of(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        cls = owner if isinstance(owner, type) else type(owner)
        raise _refusal(f"{cls.__module__}.{cls.__qualname__}.{name}") from None


def _refusal(path: str) -> UnsupportedVersionError:
    return UnsupportedVersionError("transformers", version("transformers"), path, f"{CHECKED[0]}–{CHECKED[-1]}")


def no_split_modules(model: nn.Module) -> set[str]:
    """Return the names of the classes whose modules are never split over devices."""
    return set(_of(model, "_no_split_modules") or ())


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Return the model's tensor-parallel plan: pattern of module names → style of `transformers`; may be empty."""
    return dict(_of(model, "_tp_plan") or {})


def pipeline_lists(model: nn.Module) -> list[str]:
    """Return the names of the module lists that the model's own pipeline plan, or that of a model in it, splits.

    Empty if there is no plan, as in most releases for most encoders.
    """
    lists = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        plan = dict(getattr(module, "_pp_plan", None) or {})
        if getattr(module, "base_model", None) is module:
            plan |= getattr(config, "base_model_pp_plan", None) or {}
        for key in plan:
            path = f"{name}.{key}".lstrip(".")
            if isinstance(module._modules.get(key), nn.ModuleList) and path not in lists:
                lists.append(path)
    return lists


def setting(config: Any, key: str, *, mixed: Any = None) -> Any:
    """Return a key of a model's config; None if it has none, and `mixed` if its layers have different ones."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # what newer releases raise for a key of which each layer has its own
        return mixed


def attn_implementation(config: Any) -> str:
    """Return the name of the attention implementation in a model's config, such as `sdpa`."""
    return str(_of(config, "_attn_implementation"))


@contextmanager
def attention_by(module: nn.Module, implementation: str) -> Iterator[None]:
    """Return a context in which a module that has a config computes attention by an implementation."""
    config = getattr(module, "config", None)
    if config is None:
        yield
        return
    before = attn_implementation(config)
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def may_be_missing(model: Any) -> list[str]:
    """Return patterns of the names of weights that a file may lack."""
    return list(_of(model, "_keys_to_ignore_on_load_missing") or ())


def may_be_unexpected(model: Any) -> list[str]:
    """Return patterns of the names of weights that a file may have although the model does not."""
    return list(_of(model, "_keys_to_ignore_on_load_unexpected") or ())


def initializes(module: nn.Module) -> bool:
    """Return whether a module is a (sub)model that has `_init_weights`."""
    return hasattr(module, "_init_weights")


def init_weights(owner: Any, module: nn.Module) -> None:
    """Initialize the tensors of one module by `owner._init_weights`, where `owner` is the (sub)model that has it."""
    _of(owner, "_init_weights")(module)


@contextmanager
def taken_for_initialized(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Return a context in which `init_weights` does not change these tensors."""
    if "_is_hf_initialized" not in inspect.getsource(import_module("transformers.initialization")):
        raise _refusal("transformers.initialization._is_hf_initialized")
    tensors = list(tensors)
    for tensor in tensors:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in tensors:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def generate_alone(model: nn.Module) -> None:
    """Let one rank call `generate` of a sharded model alone: by default it waits for the other ranks."""
    model._is_fsdp_managed_module = False  # type: ignore[assignment]


def overrides(cls: _Class) -> _Class:
    """Decorate a class: raise unless each method with a leading underscore overrides one of its base class.

    If transformers had removed or renamed that method, the override would never be called.
    """
    for name in vars(cls):
        if re.match(r"_[a-z]", name) and callable(vars(cls)[name]) and not hasattr(super(cls, cls), name):
            raise _refusal(f"{cls.__mro__[1].__module__}.{cls.__mro__[1].__qualname__}.{name}")
    return cls


def is_transformers_model(module: nn.Module) -> bool:
    """Return whether a model is a `PreTrainedModel`; False if nothing has imported `transformers` yet."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)


# Weights in files and in modules.
#
# [Note: weights are stored in another form]
# `transformers` stores some weights under other names and in other shapes than its modules have: the experts of a
# mixture one by one, `embed_out` for `lm_head`, a body without the prefix of its head model. Its registry
# (`conversion_mapping`) has a list of renamings and converters for a model. Here, these are applied to names alone, and
# the tensors that a converter takes together become a `WeightGroup`, which is computed when its tensors are there.


@dataclass(frozen=True, slots=True, eq=False)
class WeightGroup:
    """Tensors that are converted together: stored ones to those of a model, or the other way round."""

    sources: tuple[str, ...]
    """The names of the tensors that it takes, in order."""
    stacked: bool
    """Whether the i-th source of each pattern determines the i-th row of the one result, and nothing else."""
    _patterns: tuple[str, ...]
    """For each source, the pattern of the converter that it matched."""
    _layer: str
    _converter: Any
    """None: the one tensor only has another name."""
    _model: Any
    _renamings: tuple[Any, ...] = ()

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results by name for the sources in `tensors`: all of them, or some rows (`rows`)."""
        if self._converter is None:
            return {self._layer: tensors[self.sources[0]]}
        converter = deepcopy(self._converter)
        for name, pattern in zip(self.sources, self._patterns, strict=True):
            if name in tensors:
                converter.add_tensor(self._layer, name, pattern, tensors[name])
        answer = converter.convert(self._layer, model=self._model, config=self._model.config)
        values: Mapping[str, Any] = answer[0] if isinstance(answer, tuple) else answer  # a pair in older releases
        return {
            _renamed(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in values.items()
        }

    @property
    def renames(self) -> bool:
        """Whether the one tensor only has another name."""
        return self._converter is None

    def rows(self, rows: slice) -> tuple[str, ...]:
        """Return the sources that determine these rows of the result of a `stacked` group."""
        by_pattern: dict[str, list[str]] = {}
        for name, pattern in zip(self.sources, self._patterns, strict=True):
            by_pattern.setdefault(pattern, []).append(name)
        return tuple(name for names in by_pattern.values() for name in names[rows])


def groups_to_load(model: Any, stored: Iterable[str]) -> list[WeightGroup]:
    """Return the groups that convert the stored tensors of these names to those of a model of `transformers`.

    A name that the registry does not know is a group of its own, whose result may be no tensor of the model.
    """
    core = import_module("transformers.core_model_loading")
    rename, mapping = _of(core, "rename_source_key"), _conversions(model, add_legacy=True)
    state, prefix = model.state_dict(), model.base_model_prefix
    collected: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    renamings, converters = _kinds(core, mapping)
    for name in sorted(stored, key=_of(core, "dot_natural_key")):
        target, pattern = rename(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        elif target not in state:  # the registry may rename what has the right name, except for the prefix
            plain, _ = rename(name, [], [], prefix, state)
            target, pattern = plain if plain in state else target, None
        key = (target, pattern is not None)
        if pattern is None and key in collected:  # stored twice, under two names
            key = (name, False)
        collected.setdefault(key, []).append((name, name if pattern is None else pattern))
    return [_group(model, core, target, matched, converters) for (target, _), matched in collected.items()]


def groups_to_store(model: Any, names: Iterable[str]) -> list[WeightGroup]:
    """Return the groups that convert tensors of a model of `transformers` to those that `save_pretrained` writes."""
    core = import_module("transformers.core_model_loading")
    rename, mapping = _of(core, "rename_source_key"), _conversions(model, add_legacy=False)
    # Older releases apply the renamings before the converters, in the order of loading.
    in_two_steps = hasattr(core, "PrefixChange")
    if in_two_steps:
        mapping = [entry for entry in mapping if not isinstance(entry, core.PrefixChange)][::-1]
    renamings, converters = _kinds(core, [entry.reverse_transform() for entry in mapping])
    collected: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    for name in sorted(names, key=_of(core, "dot_natural_key")):
        target, pattern = rename(name, [] if in_two_steps else renamings, converters)
        if pattern is None:
            target = _renamed(target, renamings) if in_two_steps else target
        collected.setdefault((target, pattern is not None), []).append((name, name if pattern is None else pattern))
    later = tuple(renamings) if in_two_steps else ()
    return [_group(model, core, target, matched, converters, later) for (target, _), matched in collected.items()]


def not_stored(model: Any) -> list[str]:
    """Return patterns of the names of tensors that `save_pretrained` leaves out."""
    return list(getattr(model, "_keys_to_ignore_on_save", None) or ())


def tied_names(model: Any) -> set[str]:
    """Return the names of parameters that are written under another name, to which they are tied."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def _conversions(model: Any, *, add_legacy: bool) -> list[Any]:
    registry = import_module("transformers.conversion_mapping")
    return list(_of(registry, "get_model_conversion_mapping")(model, add_legacy=add_legacy))


def _kinds(core: Any, mapping: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [entry for entry in mapping if isinstance(entry, _of(core, "WeightRenaming"))]
    return renamings, [entry for entry in mapping if isinstance(entry, _of(core, "WeightConverter"))]


def _group(
    model: Any,
    core: Any,
    target: str,
    matched: Sequence[tuple[str, str]],
    converters: Sequence[Any],
    renamings: tuple[Any, ...] = (),
) -> WeightGroup:
    sources, patterns = zip(*matched, strict=True)
    if sources == patterns:  # no pattern is a full name
        return WeightGroup(sources, False, patterns, target, None, model)
    converter = next(entry for entry in reversed(converters) if patterns[0] in entry.source_patterns)
    first, *others = converter.operations
    stacked = (
        isinstance(first, _of(core, "MergeModulelist"))
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(_keeps_rows(core, operation) for operation in others)
    )
    return WeightGroup(sources, stacked, patterns, target, converter, model, renamings)


def _keeps_rows(core: Any, operation: Any) -> bool:
    """Return whether an operation computes each row of its result from the same row of its tensors."""
    if isinstance(operation, _of(core, "Concatenate")):
        return bool(operation.dim > 0)
    if isinstance(operation, _of(core, "Transpose")):
        return bool(operation.dim0 > 0 and operation.dim1 > 0) and not getattr(operation, "check_dims", False)
    return False


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
