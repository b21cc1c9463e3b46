"""A model of the user's own, found by `module:attribute`."""

from __future__ import annotations

import inspect

from torch import nn

from plait.config import ImportedModel, load_code
from plait.errors import ModelError


def build_imported_model(config: ImportedModel) -> nn.Module:
    """Call `model.target` with `model.args`; what makes no model is a `ModelError` that says why."""
    target = load_code(config.target, key="model.target")
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
