"""All private names of transformers that Plait uses; no other file uses any.

`CHECKED` are the releases with which all of them were tried (`make matrix`). A name that a release does not have is an
`UnsupportedVersionError` that says which; see [Note: private names are refused by name], `plait/torch_internals.py`.
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
"""The releases of transformers with which every name was tried."""

ATTRIBUTES = {
    "transformers.PreTrainedModel._no_split_modules": "the repeated units of a model",
    "transformers.PreTrainedModel._is_stateful": "models that carry a state along the sequence",
    "transformers.PreTrainedModel._tp_plan": "tensor parallelism",
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
    """The names of the classes whose modules are never split over devices."""
    return set(_of(model, "_no_split_modules") or ())


def tp_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel style of each layer, by a pattern of module names."""
    return dict(_of(model, "_tp_plan") or {})


def is_stateful(module: nn.Module) -> bool:
    """Whether a model declares that it keeps a recurrent state from token to token."""
    return bool(getattr(module, "_is_stateful", False))


def attn_implementation(config: Any) -> str:
    """The name of a model's attention implementation."""
    return str(_of(config, "_attn_implementation"))


def may_be_missing(model: Any) -> list[str]:
    """Patterns of weights that a file may lack."""
    return list(_of(model, "_keys_to_ignore_on_load_missing") or ())


def may_be_unexpected(model: Any) -> list[str]:
    """Patterns of weights that a file may have although the model does not."""
    return list(_of(model, "_keys_to_ignore_on_load_unexpected") or ())


def initializes(module: nn.Module) -> bool:
    """Whether a module is a (sub)model that initializes weights itself."""
    return hasattr(module, "_init_weights")


def init_weights(owner: Any, module: nn.Module) -> None:
    """Initialize the tensors of one module as its (sub)model `owner` does it."""
    _of(owner, "_init_weights")(module)


@contextmanager
def taken_for_initialized(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Until the block ends, `init_weights` does not change these tensors."""
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
    """Keep `generate` of a sharded model from waiting for other ranks."""
    model._is_fsdp_managed_module = False  # type: ignore[assignment]


def overrides(cls: _Class) -> _Class:
    """A class decorator: check that each method with a leading underscore overrides one of transformers.

    A method that transformers has removed or renamed would otherwise never be called.
    """
    for name in vars(cls):
        if re.match(r"_[a-z]", name) and callable(vars(cls)[name]) and not hasattr(super(cls, cls), name):
            raise _refusal(f"{cls.__mro__[1].__module__}.{cls.__mro__[1].__qualname__}.{name}")
    return cls


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a model comes from `transformers`; False as long as nothing has imported the package."""
    package = sys.modules.get("transformers.modeling_utils")
    return package is not None and isinstance(module, package.PreTrainedModel)
