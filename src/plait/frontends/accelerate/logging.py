"""`accelerate.logging`: a logger that logs on the main process, not on every rank."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """Logs on the main process only, unless `main_process_only=False`; with `in_order=True`, rank by rank."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message, if `main_process_only` and `in_order` let this process do so."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if main_only and not in_order:
            if rank == 0:
                super().log(level, msg, *args, **kwargs)
            return
        for turn in range(ranks if in_order else 1):
            if turn == rank or not in_order:
                super().log(level, msg, *args, **kwargs)
            if in_order and ranks > 1:
                dist.barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message unchanged."""
        return msg, kwargs


def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """Return a logger for scripts with several ranks."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return RankLogger(logger, {})
