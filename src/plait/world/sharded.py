"""Asking whether a tensor is sharded, without loading what shards it.

[Note: DTensor is loaded late]
Importing `torch.distributed.tensor` takes longer than all of Plait (it brings sympy). A run that shards nothing
does not need it, and as long as nobody has loaded it, no tensor can be one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor: a whole of which this rank may hold only a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. Call it without gradients enabled."""
    return tensor.to_local() if is_sharded(tensor) else tensor
