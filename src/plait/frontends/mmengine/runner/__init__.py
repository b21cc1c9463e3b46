"""The runners, and the loops that they run."""

from plait.frontends.mmengine.runner._flexible_runner import FlexibleRunner
from plait.frontends.mmengine.runner.log_processor import LogProcessor
from plait.frontends.mmengine.runner.loops import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from plait.frontends.mmengine.runner.runner import Runner

__all__ = [
    "BaseLoop",
    "EpochBasedTrainLoop",
    "FlexibleRunner",
    "IterBasedTrainLoop",
    "LogProcessor",
    "Runner",
    "TestLoop",
    "ValLoop",
]
