"""Hooks: the points of a run, and the ones that come with Plait."""

from plait.runner.hooks.base import Hook, HookTable
from plait.runner.hooks.build import build_hooks

__all__ = ["Hook", "HookTable", "build_hooks"]
