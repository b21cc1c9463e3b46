"""All private names of transformers that Plait uses; no other file uses any.

`CHECKED` are the releases with which all of them were tested (`make matrix`). Using a name that a release does not have
raises an `UnsupportedVersionError` with that name; see [Note: private names are refused by name],
`plait/torch_internals.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, TypeVar

from torch import Tensor, nn

from plait.errors import UnsupportedVersionError

CHECKED = ("5.0", "5.12", "5.23")
"""The releases of transformers with which every name was tested."""

ATTRIBUTES = {
    "transformers.PreTrainedModel._no_split_modules": "the repeated units of a model",
    "transformers.PreTrainedModel._is_stateful": "models that carry a state along the sequence",
    "transformers.PreTrainedModel._tp_plan": "tensor parallelism",
    "transformers.PreTrainedModel._pp_plan": "pipeline stages",
    "transformers.PreTrainedModel._init_weights": "initial values, module by module",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_missing": "weights that a file may lack",
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": "weights that a file may have in addition",
    "transformers.PreTrainedModel._is_fsdp_managed_module": "generation without waiting for other ranks",
    "torch.Tensor._is_hf_initialized": "initial values, module by module",
    "transformers.PretrainedConfig._attn_implementation": "context parallelism, packed documents",
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
    found = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        plan = dict(getattr(module, "_pp_plan", None) or {})
        if getattr(module, "base_model", None) is module:
            plan |= getattr(config, "base_model_pp_plan", None) or {}
        for key in plan:
            path = f"{name}.{key}".lstrip(".")
            if isinstance(module._modules.get(key), nn.ModuleList) and path not in found:
                found.append(path)
    return found


def is_stateful(module: nn.Module) -> bool:
    """Return whether a model declares that it keeps a recurrent state from token to token."""
    return bool(getattr(module, "_is_stateful", False))


def attn_implementation(config: Any) -> str:
    """Return the name of the attention implementation in a model's config, such as `sdpa`."""
    return str(_of(config, "_attn_implementation"))


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
