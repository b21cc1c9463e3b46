"""A model of the user's own, found by `module:attribute`."""

from __future__ import annotations

from torch import nn

from plait.config.model import ImportedModel
from plait.config.trust import call_code
from plait.errors import ConfigError, Problem


def build_imported_model(config: ImportedModel) -> nn.Module:
    """Call `model.target` with `model.args`; what makes no model is a `ConfigError` that says why."""
    model = call_code(config.target, config.args, key="model.target")
    if not isinstance(model, nn.Module):
        message = f"{config.target!r} made a {type(model).__name__}"
        raise ConfigError(Problem("model.target", message, "Name a class or function that makes a torch.nn.Module."))
    return model
