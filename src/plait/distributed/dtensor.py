"""Asking whether a tensor is sharded, without loading what shards it.

[Note: DTensor is loaded late]
Importing `torch.distributed.tensor` takes longer than all of Plait (it brings sympy). A run that shards nothing
does not need it, and as long as nobody has loaded it, no tensor can be one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from plait.torch_internals import dtensor_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor: a whole of which this rank may hold only a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor. Call it without gradients enabled."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def dtensor_like(local: Tensor, whole: Tensor) -> Tensor:
    """A local tensor as the whole that it is a part of, given a tensor that is spread in the same way."""
    if not is_sharded(whole):
        return local
    from torch.distributed.tensor import DTensor

    if local.device.type != whole.device_mesh.device_type:
        # `from_local` would copy it to the device: what is kept on the host would be read and written elsewhere.
        spread: Tensor = dtensor_of(local, whole)
        return spread
    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def local_grad(gradient: Tensor, param: Tensor) -> Tensor:
    """What this rank holds of a gradient, spread as its parameter is.

    Where a parameter is repeated, each rank may have computed a share of the sum only.
    """
    if not is_sharded(gradient):
        return gradient
    assert is_sharded(param)
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return gradient.to_local()
