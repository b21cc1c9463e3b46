"""Plait trains large PyTorch models: say once what to train, and in one small section how it is spread.

    from plait import Runner
    Runner(model=MyModel(), data=dataset, optim=dict(type="AdamW", lr=1e-3), strategy=dict(zero=3)).train()

Names are loaded on first use, so that `import plait` costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

from plait import errors

if TYPE_CHECKING:
    from plait.runner import Runner
    from plait.spec import LossTerm
    from plait.strategy import prepare

__version__ = "0.1.0"
__all__ = ["LossTerm", "Runner", "__version__", "errors", "prepare"]

_HOMES = {"Runner": "plait.runner", "prepare": "plait.strategy", "LossTerm": "plait.spec"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
