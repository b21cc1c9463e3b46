"""What is said of a name of DeepSpeed that is not offered here."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

_HOME = "plait.frontends.deepspeed"
_INSTEAD = {
    "DeepSpeedTransformerLayer": "torch's own attention is fused; use the model as it is",
    "DeepSpeedTransformerConfig": "torch's own attention is fused; use the model as it is",
    "DeepSpeedHybridEngine": "generate from the model that trains with plait.generate",
    "DeepSpeedConfig": "plait.frontends.deepspeed.config.translate reads a configuration, with an account of every key",
    "tp_model_init": "`tensor_parallel: {autotp_size: n}` in the configuration does the same",
    "module_inject": "`tensor_parallel: {autotp_size: n}` in the configuration spreads a model's layers",
    "onebit": "compressed optimizers are gone from DeepSpeed 0.19 too; use AdamW",
    "compression": "there is no compression of models here",
    "autotuning": "`plait tune` looks for the fastest settings",
    "profiling": "`plait profile` measures a step's operations, memory and time",
    "nebula": "`checkpoint.async_save` writes checkpoints while training goes on",
    "sequence": "`strategy.layout.cp` with `plait train` spreads sequences",
    "linear": "LoRA models of peft train as they are",
}


def not_offered(module: str, name: str) -> AttributeError:
    """The error for a name that a module here does not have."""
    return AttributeError(_words(_short(module), name))


class AbsentModules(MetaPathFinder):
    """Says the same of a module that is not here, in `import deepspeed.x` and in `from deepspeed import x`.

    Stands behind all other finders, so that it is asked only for what nobody has found. Without it Python's own message
    would come: a module's `__getattr__` is not asked for modules, and `from … import` drops what it says.
    """

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise for a name below this package; all others are none of its business."""
        if fullname.startswith(f"{_HOME}."):
            module, _, name = _short(fullname).rpartition(".")
            # Python swallows an error with the very name it asked for, and would then speak itself.
            raise ModuleNotFoundError(_words(module, name), name=_short(fullname))


def explain_absent_modules() -> None:
    """Once for a process."""
    if not any(isinstance(finder, AbsentModules) for finder in sys.meta_path):
        sys.meta_path.append(AbsentModules())


def _short(module: str) -> str:
    """As DeepSpeed's own scripts write it."""
    return module.replace(_HOME, "deepspeed", 1)


def _words(module: str, name: str) -> str:
    instead = f": {_INSTEAD[name]}" if name in _INSTEAD else "; docs/deepspeed-api.md lists what is"
    return f"{module}.{name} is not offered by Plait's DeepSpeed front end{instead}"
