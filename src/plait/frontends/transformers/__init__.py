"""The Hugging Face Trainer, spread by Plait: `from plait.frontends.transformers import PlaitTrainer`.

Needs `transformers` and `accelerate`; loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.frontends.transformers.trainer import PlaitTrainer

__all__ = ["PlaitTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from plait.errors import MissingExtraError

    try:
        from plait.frontends.transformers.trainer import PlaitTrainer
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("plait"):
            raise
        raise MissingExtraError(missing.name or "transformers", "PlaitTrainer", "hf") from missing
    return PlaitTrainer
