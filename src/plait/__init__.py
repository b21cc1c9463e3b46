"""Plait trains large PyTorch models: say once what to train, and in one small section how it is spread.

    from plait import Runner
    Runner(model=MyModel(), data=dataset, optim=dict(type="AdamW", lr=1e-3), strategy=dict(zero=3)).train()

Names are loaded on first use, so that `import plait` costs next to nothing.
"""

from typing import TYPE_CHECKING

from plait import errors

if TYPE_CHECKING:
    from plait.runner import Runner as Runner
    from plait.spec import LossTerm as LossTerm
    from plait.strategy import prepare as prepare
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "runner": ["Runner"],
            "spec": ["LossTerm"],
            "strategy": ["prepare"],
        },
    )

__version__ = "0.1.0"
__all__ = ["LossTerm", "Runner", "__version__", "errors", "prepare"]
