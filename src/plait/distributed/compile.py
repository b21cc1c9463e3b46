"""`torch.compile`: each unit by itself where the model is sharded, else the whole model."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from plait.config import CompileConfig
from plait.distributed.wrap import WrapUnit
from plait.errors import ConfigError, Problem
from plait.torch_internals import set_compiled_call


def reason_not_to_compile(config: CompileConfig, device: torch.device) -> str | None:
    """Return why compiling cannot work on this machine (no Triton, no C++ compiler); None if nothing is missing."""
    if config.backend != "inductor":
        return None
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl")):
        return "no C++ compiler was found"
    return None


def compile_wrapped_modules(
    model: nn.Module, units: Sequence[WrapUnit], config: CompileConfig, *, sharded: bool
) -> list[nn.Module]:
    """Compile the whole model or each unit; return the compiled modules.

    Modules are compiled in place, so no parameter changes its name. `config.scope` chooses; `auto` is the whole model
    where nothing is `sharded` or there are no units. An unknown backend is a `ConfigError`.
    """
    whole = config.scope == "model" or (config.scope == "auto" and (not sharded or not units))
    targets = [model] if whole else [unit.module for unit in units]
    options: dict[str, Any] = {
        "backend": config.backend,
        "dynamic": config.dynamic,
        "fullgraph": config.fullgraph,
    }
    if config.mode is not None:
        options["mode"] = config.mode
    _check_backend(config.backend)
    for module in targets:
        module.compile(**options)
    return targets


def _check_backend(name: str) -> None:
    from plait.torch_internals import InvalidBackend, lookup_backend

    try:
        lookup_backend(name)
    except InvalidBackend:
        raise ConfigError(
            Problem(
                "strategy.compile.backend",
                f"torch has no compiler backend {name!r}",
                f"There are: {', '.join(torch.compiler.list_backends())}.",
            )
        ) from None


def undo_compile(modules: Sequence[nn.Module]) -> None:
    """Run these modules eagerly from now on."""
    for module in modules:
        set_compiled_call(module, None)
