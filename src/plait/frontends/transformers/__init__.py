"""The Hugging Face Trainer on Plait's engine: `from plait.frontends.transformers import PlaitTrainer`.

`TrainingArguments` replaces the class of `transformers` for runs with `deepspeed=`. Both classes need `transformers`
and `accelerate`, and are imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.frontends.transformers.trainer import PlaitTrainer, TrainingArguments

__all__ = ["PlaitTrainer", "TrainingArguments"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from plait.errors import MissingExtraError

    try:
        return getattr(import_module(f"{__name__}.trainer"), name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("plait"):
            raise
        raise MissingExtraError(missing.name or "transformers", name, "trainer") from missing
