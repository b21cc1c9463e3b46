"""The Runner, its hooks and metrics."""

from plait.runner.hooks import Hook
from plait.runner.metrics import Accuracy, Metric
from plait.runner.runner import Runner

__all__ = ["Accuracy", "Hook", "Metric", "Runner"]
