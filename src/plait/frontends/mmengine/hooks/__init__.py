"""Code that runs at named points of a run."""

from plait.frontends.mmengine.hooks.checkpoint import CheckpointHook
from plait.frontends.mmengine.hooks.early_stopping import EarlyStoppingHook
from plait.frontends.mmengine.hooks.ema import EMAHook
from plait.frontends.mmengine.hooks.empty_cache import EmptyCacheHook
from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.hooks.iter_timer import IterTimerHook
from plait.frontends.mmengine.hooks.logger import LoggerHook
from plait.frontends.mmengine.hooks.param_scheduler import ParamSchedulerHook
from plait.frontends.mmengine.hooks.runtime_info import RuntimeInfoHook
from plait.frontends.mmengine.hooks.sampler_seed import DistSamplerSeedHook
from plait.frontends.mmengine.hooks.sync_buffers import SyncBuffersHook

__all__ = [
    "CheckpointHook",
    "DistSamplerSeedHook",
    "EMAHook",
    "EarlyStoppingHook",
    "EmptyCacheHook",
    "Hook",
    "IterTimerHook",
    "LoggerHook",
    "ParamSchedulerHook",
    "RuntimeInfoHook",
    "SyncBuffersHook",
]
