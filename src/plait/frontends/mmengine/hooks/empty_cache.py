"""Gives memory that torch keeps back to the device."""

from __future__ import annotations

from typing import Any

import torch

from plait.frontends.mmengine.hooks.hook import Hook
from plait.frontends.mmengine.registry import HOOKS


@HOOKS.register_module()
class EmptyCacheHook(Hook):
    """Before or after passes, or after iterations. On CPU torch keeps nothing back."""

    priority = "NORMAL"

    def __init__(self, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        self._wanted = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self._empty("before_epoch")

    def _after_epoch(self, runner: Any, mode: str = "train") -> None:
        self._empty("after_epoch")

    def _after_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None, mode: str = "train"
    ) -> None:
        self._empty("after_iter")

    def _empty(self, moment: str) -> None:
        if self._wanted[moment] and torch.cuda.is_available():
            torch.cuda.empty_cache()
