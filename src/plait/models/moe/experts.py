"""The experts of one mixture: three stacks of matrices, and a product that takes each row to its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.common.init import LM_STD, residual_output, start_scale


class Experts(nn.Module):
    """Gated feed-forwards side by side, as 3-D parameters (experts, out, in).

    What is chosen, and what an answer counts, comes from outside. `forward` has the arguments and the answer
    that the experts of `transformers` have, so whatever spreads experts over ranks can treat both alike.
    """

    def __init__(self, experts: int, dim: int, hidden: int, *, layers: int, drops: bool = False) -> None:
        super().__init__()
        self.num_experts = experts
        self.drops = drops
        """Whether a choice may be `num_experts`, which means: none."""
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        residual_output(self, layers)

    def reset_parameters(self) -> None:
        """Start like the matrices of a dense feed-forward; only `down` writes into the residual stream."""
        nn.init.normal_(self.gate, std=LM_STD)
        nn.init.normal_(self.up, std=LM_STD)
        nn.init.normal_(self.down, std=LM_STD * start_scale(self))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted answers to `hidden` (tokens, dim), whose experts are `index` (tokens, top_k)."""
        tokens, top_k = index.shape
        chosen, order = index.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, torch.arange(1, self.num_experts + 1, device=index.device), out_int32=True)
        # Repeated, then reordered: both have a gradient that adds up in a fixed order.
        rows = hidden[:, None].expand(-1, top_k, -1).flatten(0, 1).index_select(0, order)
        if self.drops:
            # No product reads or writes the rows behind the last expert's, so they hold anything.
            real = (torch.arange(len(order), device=index.device) < ends[-1])[:, None]
            rows = rows.where(real, 0.0)
        inner = F.silu(grouped_linear(rows, self.gate, ends)) * grouped_linear(rows, self.up, ends)
        answers = grouped_linear(inner, self.down, ends)
        if self.drops:
            answers = answers.where(real, 0.0)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        answers = answers.index_select(0, back).reshape(tokens, top_k, hidden.shape[1])
        return (answers * weights[..., None]).sum(1).to(hidden.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row (rows, in) times the matrix of its group (groups, out, in).

    Rows are sorted by group, and `ends` (int32) says where each group ends. An empty group's matrix gets a
    gradient of zeros. Rows behind the last end are left out: what comes back for them is anything at all.
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type):  # which knows no grouped product
        dtype = torch.get_autocast_dtype(weight.device.type)
    rows, weight = rows.to(dtype), weight.to(dtype)
    if can_be_grouped(rows, weight):
        return F.grouped_mm(rows, weight.mT, offs=ends)
    product: Tensor = looped_linear(rows, weight, ends)
    return product


def can_be_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these; it wants rows of whole 16 bytes, both ways."""
    if any(size * weight.element_size() % 16 for size in weight.shape[1:]) or not len(rows):
        return False
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    if torch.compiler.is_compiling() or type(rows) is not Tensor:  # traced, or of no values: known in bf16 only
        return weight.dtype == torch.bfloat16
    return weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


# The plain twin: group by group, for what the grouped product does not take. One operator to `torch.compile`,
# which could not follow a loop over sizes that are data.
@torch.library.custom_op("plait::looped_linear", mutates_args=())
def looped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear`, one product a group; rows behind the last end become zeros."""
    product = rows.new_zeros(len(rows), weight.shape[1])
    for group, (start, end) in enumerate(_groups(ends)):
        torch.mm(rows[start:end], weight[group].t(), out=product[start:end])
    return product


@torch.library.custom_op("plait::looped_linear_backward", mutates_args=())
def _looped_backward(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the matrices."""
    grad_rows, grad_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for group, (start, end) in enumerate(_groups(ends)):
        torch.mm(grad[start:end], weight[group], out=grad_rows[start:end])
        torch.mm(grad[start:end].t(), rows[start:end], out=grad_weight[group])
    return grad_rows, grad_weight


def _groups(ends: Tensor) -> list[tuple[int, int]]:
    stops = ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


@looped_linear.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_looped_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_looped_backward(grad.contiguous(), *ctx.saved_tensors), None


looped_linear.register_autograd(_back, setup_context=_keep)
