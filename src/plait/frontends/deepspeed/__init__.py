"""DeepSpeed's API on Plait's native engine: `import plait.frontends.deepspeed as deepspeed`.

A training script runs as it is, with this one line changed. `docs/deepspeed-api.md` lists what is offered.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.frontends.deepspeed.absent import explain_absent_modules, not_offered

if TYPE_CHECKING:
    from plait.frontends.deepspeed import (
        accelerator,
        checkpoint,
        checkpointing,
        comm,
        config,
        moe,
        ops,
        pipe,
        runtime,
        utils,
        zero,
    )
    from plait.frontends.deepspeed.accelerator import get_accelerator
    from plait.frontends.deepspeed.comm import init_distributed
    from plait.frontends.deepspeed.engine import DeepSpeedEngine
    from plait.frontends.deepspeed.inference import InferenceEngine, init_inference
    from plait.frontends.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from plait.frontends.deepspeed.pipeline import PipelineEngine
    from plait.frontends.deepspeed.start import add_config_arguments, initialize
    from plait.frontends.deepspeed.utils import OnDevice, log_dist, logger

__version__ = "0.19.8+plait"
"""The DeepSpeed whose API this is."""
version = __version__

_HOMES = {
    "DeepSpeedEngine": "engine",
    "InferenceEngine": "inference",
    "LayerSpec": "pipe",
    "OnDevice": "utils",
    "PipelineEngine": "pipeline",
    "PipelineModule": "pipe",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "start",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "init_inference": "inference",
    "initialize": "start",
    "log_dist": "utils",
    "logger": "utils",
}
_MODULES = (
    "accelerator",
    "checkpoint",
    "checkpointing",
    "comm",
    "config",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
)

__all__ = [
    "DeepSpeedEngine",
    "InferenceEngine",
    "LayerSpec",
    "OnDevice",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "config",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "version",
    "zero",
]

explain_absent_modules()


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a configuration can be translated without loading torch.
    if name in (*_MODULES, "dist"):  # which is another word for `comm`
        return import_module(f"{__name__}.{'comm' if name == 'dist' else name}")
    if name not in _HOMES:
        raise not_offered(__name__, name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
