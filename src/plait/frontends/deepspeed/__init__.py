"""DeepSpeed's API on Plait's native engine: `import plait.frontends.deepspeed as deepspeed`.

In a training script, only this import has to change. `docs/deepspeed-api.md` lists what is offered.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from plait.frontends.deepspeed.module_layout import DEEPSPEED, not_offered

if TYPE_CHECKING:
    from plait.frontends.deepspeed import accelerator as accelerator
    from plait.frontends.deepspeed import chat as chat
    from plait.frontends.deepspeed import checkpointing as checkpointing
    from plait.frontends.deepspeed import comm as comm
    from plait.frontends.deepspeed import config as config
    from plait.frontends.deepspeed import pipe as pipe
    from plait.frontends.deepspeed import utils as utils
    from plait.frontends.deepspeed import zero as zero
    from plait.frontends.deepspeed.accelerator import get_accelerator as get_accelerator
    from plait.frontends.deepspeed.comm import init_distributed as init_distributed
    from plait.frontends.deepspeed.config import is_deepspeed as is_deepspeed
    from plait.frontends.deepspeed.config import search as search
    from plait.frontends.deepspeed.config import translate as translate
    from plait.frontends.deepspeed.config.read import read_config as read_config
    from plait.frontends.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
    from plait.frontends.deepspeed.inference import InferenceEngine as InferenceEngine
    from plait.frontends.deepspeed.inference import init_inference as init_inference
    from plait.frontends.deepspeed.initialization import Parameters as Parameters
    from plait.frontends.deepspeed.initialization import Recipe as Recipe
    from plait.frontends.deepspeed.initialization import add_config_arguments as add_config_arguments
    from plait.frontends.deepspeed.initialization import initialize as initialize
    from plait.frontends.deepspeed.lr_schedules import Scheduler as Scheduler
    from plait.frontends.deepspeed.pipe import LayerSpec as LayerSpec
    from plait.frontends.deepspeed.pipe import PipelineModule as PipelineModule
    from plait.frontends.deepspeed.pipe import TiedLayerSpec as TiedLayerSpec
    from plait.frontends.deepspeed.pipeline_engine import PipelineEngine as PipelineEngine
    from plait.frontends.deepspeed.saving import foreign_state as foreign_state
    from plait.frontends.deepspeed.utils import OnDevice as OnDevice
    from plait.frontends.deepspeed.utils import log_dist as log_dist
    from plait.frontends.deepspeed.utils import logger as logger
else:
    from plait.lazy import attach_names

    attach_names(__name__, unknown=not_offered)

__version__ = "0.19.8+plait"
"""The version of DeepSpeed whose API this is."""
version = __version__

DEEPSPEED.install()


def __getattr__(name: str) -> Any:
    if name == "dist":  # DeepSpeed has `comm` under this name too
        return import_module(f"{__name__}.comm")
    if name in DEEPSPEED.modules:  # `ops`, `runtime`, …, which have no file
        return import_module(f"{__name__}.{name}")
    raise AttributeError(name)  # then the package's lazy names are tried
