"""A model of the user's own, found by `module:attribute`."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from typing import Any

from torch import nn

from plait.config.model import ImportedModel
from plait.errors import ModelError


def build_imported_model(config: ImportedModel) -> nn.Module:
    """Call `model.target` with `model.args`; every way this can go wrong is a `ModelError` that says how."""
    target = _resolve(config.target)
    if not callable(target):
        raise ModelError(f"model.target={config.target!r} is a {type(target).__name__}; name a class or a function")
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-ins have none; calling them is the only test
        signature = None
    if signature is not None:
        try:
            signature.bind(**config.args)
        except TypeError as error:
            raise ModelError(f"model.args={config.args} do not fit {config.target}{signature}: {error}") from error
    model = target(**config.args)
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model.target={config.target!r} made a {type(model).__name__}; it has to make a torch.nn.Module"
        )
    return model


def _resolve(target: str) -> Any:
    module_name, _, path = target.partition(":")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"model.target={target!r}: there is no module {error.name!r}; "
                "install it, or put its folder on PYTHONPATH"
            ) from error
        raise ModelError(f"model.target={target!r}: importing {module_name!r} failed: {error}") from error
    except ImportError as error:
        raise ModelError(f"model.target={target!r}: importing {module_name!r} failed: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ModelError(f"model.target={target!r}: {module_name!r} has no attribute {name!r}{hint}")
        found = getattr(found, name)
    return found
