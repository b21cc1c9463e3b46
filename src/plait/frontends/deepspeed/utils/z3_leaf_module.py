"""`deepspeed.utils.z3_leaf_module`: modules of which scripts say that they are gathered as one.

Here every block of a model is gathered as one when it is entered, and whatever lies in it with it: experts that a batch
does not use need no word. So the marks are kept for those who ask for them, and change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes, given as classes or by name; returns them."""
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the marks off; returns the modules."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked."""
    return bool(getattr(model, "_z3_leaf", False))


def _mark(model: nn.Module, kinds: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}
    found: list[Any] = [
        module for module in model.modules() if isinstance(module, classes) or type(module).__name__ in names
    ]
    if not found and must_exist:
        raise ValueError(f"the model has no module of {', '.join(str(kind) for kind in kinds)}")
    for module in found:
        module._z3_leaf = flag
    return found
