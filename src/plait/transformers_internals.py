"""Everything private of transformers that Plait uses, and nothing else of Plait uses anything private of transformers.

`CHECKED` are the releases with which all of it was tried (`make matrix`). A name that a release does not have is an
`UnsupportedVersionError` that says which; see [Note: private names are refused by name], `plait/torch_internals.py`.
"""

from __future__ import annotations

import inspect
import re
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
    "transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected": "weights that a file may have beside",
    "transformers.PreTrainedModel._is_fsdp_managed_module": "generation that does not wait for other ranks",
    "torch.Tensor._is_hf_initialized": "initial values, module by module",
    "transformers.PretrainedConfig._attn_implementation": "context parallelism, packed documents",
}
"""The attributes that are asked for, and what for."""

_Class = TypeVar("_Class", bound=type)


def _of(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, type) else type(owner)
        raise _refusal(f"{kind.__module__}.{kind.__qualname__}.{name}") from None


def _refusal(path: str) -> UnsupportedVersionError:
    return UnsupportedVersionError("transformers", version("transformers"), path, f"{CHECKED[0]}–{CHECKED[-1]}")


def no_split_modules(model: nn.Module) -> set[str]:
    """The names of the classes whose modules are never split over devices."""
    return set(_of(model, "_no_split_modules") or ())


def tp_plan(model: nn.Module) -> dict[str, str]:
    """How each layer is spread over tensor-parallel ranks, by the pattern of its name."""
    return dict(_of(model, "_tp_plan") or {})


def is_stateful(module: nn.Module) -> bool:
    """Whether a model keeps a recurrent state from token to token, as it says itself."""
    return bool(getattr(module, "_is_stateful", False))


def attn_implementation(config: Any) -> str:
    """By which implementation a model attends."""
    return str(_of(config, "_attn_implementation"))


def may_be_missing(model: Any) -> list[str]:
    """Patterns of weights that a file may lack."""
    return list(_of(model, "_keys_to_ignore_on_load_missing") or ())


def may_be_unexpected(model: Any) -> list[str]:
    """Patterns of weights that a file may have, and the model has not."""
    return list(_of(model, "_keys_to_ignore_on_load_unexpected") or ())


def initializes(module: nn.Module) -> bool:
    """Whether a module is a (sub)model with rules of its own for initial values."""
    return hasattr(module, "_init_weights")


def init_weights(owner: Any, module: nn.Module) -> None:
    """Fill the tensors of one module by the rules of the (sub)model that it belongs to."""
    _of(owner, "_init_weights")(module)


@contextmanager
def taken_for_initialized(tensors: Iterable[Tensor]) -> Iterator[None]:
    """The rules for initial values leave these tensors alone until the block ends."""
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
    """Have `generate` of a sharded model not wait for other ranks."""
    model._is_fsdp_managed_module = False  # type: ignore[assignment]


def overrides(kind: _Class) -> _Class:
    """A class decorator: each method with a leading underscore replaces one of transformers, and must find it there.

    One that is gone, or has another name, would never be called, and nobody would notice.
    """
    for name in vars(kind):
        if re.match(r"_[a-z]", name) and callable(vars(kind)[name]) and not hasattr(super(kind, kind), name):
            raise _refusal(f"{kind.__mro__[1].__module__}.{kind.__mro__[1].__qualname__}.{name}")
    return kind
