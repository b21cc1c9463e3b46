"""The library itself: imported late, pointed at the right device, and kept from talking over the run's own log."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from plait.config import check_library
from plait.strategy.native.forward import Say
from plait.world import World, export_ranks, open_group_of_one

_EXPECTED = ("untested optimizer", "OVERFLOW")
"""Parts of warnings about what Plait does on purpose, or tells itself."""


class _Relay(logging.Handler):
    """Hands a library's warnings to the run's log, each once."""

    def __init__(self, say: Say) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it, unless it is about what was meant or was told before."""
        text = record.getMessage()
        if text not in self._told and not any(part in text for part in _EXPECTED):
            self._told.add(text)
            self._say(f"deepspeed: {text}")


def load_deepspeed(world: World, say: Say) -> Any:
    """The package `deepspeed`, ready for `world`."""
    check_library("deepspeed")
    export_ranks(world.ranks)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what it says while it is imported is about devices, and is decided here
    try:
        deepspeed = importlib.import_module("deepspeed")
        if world.device.type == "cpu":
            _use_the_cpu(deepspeed)
    finally:
        logging.disable(before)
    logger = logging.getLogger("DeepSpeed")
    logger.handlers[:] = [_Relay(say)] if world.is_main else [logging.NullHandler()]
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)  # alone, DeepSpeed would look for MPI to make one
    # Without it, the first thing that asks DeepSpeed for the number of ranks is told one.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _use_the_cpu(deepspeed: Any) -> None:
    accelerator = importlib.import_module("deepspeed.accelerator")
    kind = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
    if not isinstance(accelerator.get_accelerator(), kind):
        accelerator.set_accelerator(kind())
    # It would be compiled at the start, for collectives that are gloo's here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
