"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clone_tensors_for_torch_save(item: Any, device: str | torch.device = "cpu") -> Any:
    """Nested tensors, each with storage of its own: a part of a larger one would be saved with all of it."""
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(each, device) for key, each in item.items()})
    return item
