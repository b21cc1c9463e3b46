"""`accelerate.utils.other`: unwrapping models, saving objects, waiting for ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from plait.distributed import OptimizedModule, detect_ranks, original_module_of
from plait.frontends.accelerate.prepared import PreparedModel
from plait.frontends.accelerate.state_files import write_object


def wait_for_everyone() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model without its wrappers: of `prepare`, DP, DDP, and unless kept of `torch.compile`."""
    while isinstance(model, (PreparedModel, nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if not keep_torch_compile and is_compiled_module(model):
        return original_module_of(model)
    return model


def is_compiled_module(module: nn.Module) -> bool:
    """Whether a module was returned by `torch.compile`."""
    return isinstance(module, OptimizedModule)


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object from the main process, or from the first one of each host."""
    ranks = detect_ranks()
    if (ranks.local_rank if save_on_each_node else ranks.rank) == 0:
        write_object(obj, Path(f), safe=safe_serialization)
