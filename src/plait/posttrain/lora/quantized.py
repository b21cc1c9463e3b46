"""Frozen matrices in 8 or 4 bits a number, beside adapters in full precision (Dettmers et al., 2023).

A block is 64 neighbours of the matrix, with one fp32 scale. `int8`: 255 even steps. `nf4`: 16 levels that split a
normal distribution evenly, two codes a byte. Codes are buffers, whole on every rank: of such a model, ZeRO shards what
is trained. The product is differentiated with respect to its input only, and the matrix is unpacked again for that,
so that it never lies around whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.posttrain.lora.layer import is_transposed

Kind = Literal["int8", "nf4"]
BLOCK = 64


def _normal_levels() -> tuple[float, ...]:
    """16 quantiles of a normal distribution, one of them zero, from -1 to 1; one more above zero than below."""
    outermost, cut = 0.9677083, NormalDist().inv_cdf
    above = [cut(outermost + (0.5 - outermost) * step / 8) for step in range(8)]
    below = [-cut(outermost + (0.5 - outermost) * step / 7) for step in range(7)]
    return tuple(level / above[0] for level in sorted([*above, 0.0, *below]))


NF4 = _normal_levels()


def pack(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True)
    unit = blocks / torch.where(scales > 0, scales, 1.0)
    if kind == "int8":
        return (unit * 127).round().to(torch.int8), scales
    levels = torch.tensor(NF4, device=weight.device)
    codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return codes[:, 0::2] * 16 + codes[:, 1::2], scales


def unpack(codes: Tensor, scales: Tensor, kind: Kind, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The matrix that codes and scales stand for."""
    if kind == "int8":
        unit = codes.float() / 127
    else:
        both = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        unit = torch.tensor(NF4, device=codes.device)[both.int()]
    return (unit * scales).flatten()[: shape.numel()].view(shape).to(dtype)


class Quantized(nn.Module):
    """What the class of a linear layer is extended by, once its matrix is packed."""

    weight_codes: Tensor
    weight_scales: Tensor
    packed_kind: Kind
    packed_shape: torch.Size

    def forward(self, x: Tensor) -> Tensor:
        """The layer's product, in the format of the input."""
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        bias = self._parameters.get("bias")
        return y if bias is None else y + bias.to(y.dtype)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The matrix as (out, in)."""
        whole = unpack(self.weight_codes, self.weight_scales, self.packed_kind, self.packed_shape, dtype)
        return whole.t() if is_transposed(self) else whole


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Quantized) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.unpacked(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.unpacked(grad.dtype), None


def quantize(model: nn.Module, names: list[str], kind: Kind) -> None:
    """Pack the matrices of linear layers, in place. Names of all other tensors stay."""
    for name in names:
        module = model.get_submodule(name)
        weight = module._parameters.pop("weight")
        assert weight is not None
        original = type(module)
        members = {"__module__": original.__module__, "packed_kind": kind, "packed_shape": weight.shape}
        module.__class__ = type(original.__name__, (Quantized, original), members)
        codes, scales = pack(weight, kind)
        module.register_buffer("weight_codes", codes)
        module.register_buffer("weight_scales", scales)


@contextmanager
def whole_weight(module: nn.Module) -> Iterator[None]:
    """A layer with its whole matrix, to be set; packed again afterwards. Any other module stays as it is."""
    if not isinstance(module, Quantized):
        yield
        return
    device = module.weight_codes.device
    weight = nn.Parameter(torch.empty(module.packed_shape, device=device), requires_grad=False)
    module._parameters["weight"] = weight
    try:
        yield
    finally:
        del module._parameters["weight"]
    codes, scales = pack(weight, module.packed_kind)
    module.weight_codes.copy_(codes)
    module.weight_scales.copy_(scales)
