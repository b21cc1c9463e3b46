"""DTensor helpers that do not import `torch.distributed.tensor` until a DTensor exists.

[Note: DTensor is loaded late]
Importing `torch.distributed.tensor` takes longer than all of Plait (it imports sympy). A run that shards nothing
does not need it, and as long as nothing has imported it, no tensor can be a DTensor.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from plait.torch_internals import dtensor_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Return whether this is a DTensor, of which this rank may have only a shard."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; any other tensor as it is. Call it without gradients enabled."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def dtensor_like(local: Tensor, template: Tensor) -> Tensor:
    """Return `local` as a DTensor like `template`, with its mesh and placements; as it is if that is not a DTensor."""
    if not is_sharded(template):
        return local
    from torch.distributed.tensor import DTensor

    if local.device.type != template.device_mesh.device_type:
        # `from_local` would copy a host tensor to the device, so that writes would not change the host tensor.
        wrapped: Tensor = dtensor_of(local, template)
        return wrapped
    return DTensor.from_local(
        local,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def local_grad(gradient: Tensor, param: Tensor) -> Tensor:
    """Return this rank's local part of a gradient, with the placements of its parameter.

    The gradient of a replicated parameter may be a partial sum on each rank; then it is summed over ranks here.
    """
    if not is_sharded(gradient):
        return gradient
    assert is_sharded(param)
    if gradient.placements != param.placements:
        gradient = gradient.redistribute(placements=param.placements)
    return gradient.to_local()
