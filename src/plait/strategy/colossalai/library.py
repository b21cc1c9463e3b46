"""The library itself: imported late, and kept from talking over the run's own log."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

from plait.config import check_library
from plait.errors import ConfigError, Problem
from plait.world import World, export_ranks, open_group_of_one


def load_colossalai(world: World) -> Any:
    """The package `colossalai`, ready for `world`. It wants a GPU: its CPU paths end in errors of their own."""
    check_library("colossalai")
    export_ranks(world.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels of Apex and others that it would rather have
        colossalai = importlib.import_module("colossalai")
        importlib.import_module("colossalai.booster")
    importlib.import_module("colossalai.logging").disable_existing_loggers()
    logging.getLogger("colossalai").setLevel(logging.WARNING)
    kind = importlib.import_module("colossalai.accelerator").get_accelerator().name
    if kind not in ("cuda", "npu"):
        message = f"colossalai {colossalai.__version__} trains on cuda or npu, and this is {kind}"
        raise ConfigError(Problem("strategy.engine", message, "Use `engine: native`, or a machine with a GPU."))
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    open_group_of_one(world.device)
    return colossalai
