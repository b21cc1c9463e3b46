"""MMEngine's API on Plait's engine: `from plait.frontends.mmengine import FlexibleRunner, Runner`.

Its modules have MMEngine's names (`runner`, `model`, `evaluator`, `hooks`, `optim`, `registry`, `config`, `dataset`,
`dist`), so that only the imports of a script have to change.
"""

from plait.frontends.mmengine.config import Config, ConfigDict, DictAction
from plait.frontends.mmengine.dataset import DefaultSampler, InfiniteSampler, default_collate, pseudo_collate
from plait.frontends.mmengine.evaluator import BaseMetric, Evaluator
from plait.frontends.mmengine.hooks import Hook
from plait.frontends.mmengine.logging import HistoryBuffer, MessageHub
from plait.frontends.mmengine.model import BaseDataPreprocessor, BaseModel, BaseModule, ImgDataPreprocessor
from plait.frontends.mmengine.optim import AmpOptimWrapper, DeepSpeedOptimWrapper, OptimWrapper
from plait.frontends.mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    FUNCTIONS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZERS,
    PARAM_SCHEDULERS,
    RUNNERS,
    STRATEGIES,
    TRANSFORMS,
    VISBACKENDS,
    VISUALIZERS,
    Registry,
)
from plait.frontends.mmengine.runner import FlexibleRunner, Runner

__all__ = [
    "DATASETS",
    "DATA_SAMPLERS",
    "FUNCTIONS",
    "HOOKS",
    "LOOPS",
    "METRICS",
    "MODELS",
    "OPTIMIZERS",
    "OPTIM_WRAPPERS",
    "PARAM_SCHEDULERS",
    "RUNNERS",
    "STRATEGIES",
    "TRANSFORMS",
    "VISBACKENDS",
    "VISUALIZERS",
    "AmpOptimWrapper",
    "BaseDataPreprocessor",
    "BaseMetric",
    "BaseModel",
    "BaseModule",
    "Config",
    "ConfigDict",
    "DeepSpeedOptimWrapper",
    "DefaultSampler",
    "DictAction",
    "Evaluator",
    "FlexibleRunner",
    "HistoryBuffer",
    "Hook",
    "ImgDataPreprocessor",
    "InfiniteSampler",
    "MessageHub",
    "OptimWrapper",
    "Registry",
    "Runner",
    "default_collate",
    "pseudo_collate",
]
