"""A mixture-of-experts Llama: the model, its named sizes, and its weights in the naming of `transformers` (Mixtral)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import MoeConfig
from plait.errors import ModelError
from plait.models import llama as llama
from plait.models.common.attention import Attention, Shared
from plait.models.common.init import (
    LM_STD,
    decoder_flops_per_token,
    decoder_plan,
    init_lm_module,
    residual_output,
    start_scale,
)
from plait.models.common.protocol import IGNORE_INDEX, LossTerm
from plait.models.common.weights import Made, Put, by_translation, same, stream_weights, weight_files
from plait.models.llama import DENSE, Llama, SwiGLU, ffn_dim


class Experts(nn.Module):
    """The gated feed-forwards of all experts, as 3-D parameters (experts, out, in).

    `forward` has the arguments and the result of the experts in `transformers`, so that expert parallelism supports
    both in the same way.
    """

    def __init__(self, experts: int, dim: int, hidden: int, *, layers: int, drops: bool = False) -> None:
        super().__init__()
        self.num_experts = experts
        self.drops = drops
        """Whether an index may be `num_experts`, which stands for a choice that was dropped; see `Router`."""
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))
        residual_output(self, layers)

    def reset_parameters(self) -> None:
        """Initialize like a dense feed-forward: only `down`, which writes into the residual stream, is scaled."""
        nn.init.normal_(self.gate, std=LM_STD)
        nn.init.normal_(self.up, std=LM_STD)
        nn.init.normal_(self.down, std=LM_STD * start_scale(self))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return, for each token of `hidden` (tokens, dim), the weighted sum of the outputs of its experts.

        `index` (tokens, top_k) are the experts of each token, `weights` (tokens, top_k) the weights of their outputs.
        """
        tokens, top_k = index.shape
        chosen, order = index.flatten().sort(stable=True)
        group_ends = torch.searchsorted(
            chosen, torch.arange(1, self.num_experts + 1, device=index.device), out_int32=True
        )
        # Repeated and then reordered, since the backward pass of both operations adds up in a fixed order.
        rows = hidden[:, None].expand(-1, top_k, -1).flatten(0, 1).index_select(0, order)
        if self.drops:
            # `grouped_linear` skips the rows after the last expert's: its results for them are uninitialized.
            real = (torch.arange(len(order), device=index.device) < group_ends[-1])[:, None]
            rows = rows.where(real, 0.0)
        inner = F.silu(grouped_linear(rows, self.gate, group_ends)) * grouped_linear(rows, self.up, group_ends)
        answers = grouped_linear(inner, self.down, group_ends)
        if self.drops:
            answers = answers.where(real, 0.0)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        answers = answers.index_select(0, back).reshape(tokens, top_k, hidden.shape[1])
        return (answers * weights[..., None]).sum(1).to(hidden.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Return each row (rows, in) multiplied with the matrix of its group (groups, out, in).

    Rows are sorted by group, and `group_ends` (int32) are the indices at which the groups end. The matrix of an empty
    group gets a gradient of zeros. Rows after the last end are skipped: their results are undefined.
    """
    dtype = weight.dtype
    if torch.is_autocast_enabled(weight.device.type):  # which does not handle grouped products
        dtype = torch.get_autocast_dtype(weight.device.type)
    rows, weight = rows.to(dtype), weight.to(dtype)
    if can_be_grouped(rows, weight):
        return F.grouped_mm(rows, weight.mT, offs=group_ends)
    product: Tensor = looped_linear(rows, weight, group_ends)
    return product


def can_be_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` supports these: both sizes of a matrix must be multiples of 16 bytes."""
    if any(size * weight.element_size() % 16 for size in weight.shape[1:]) or not len(rows):
        return False
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return False
    if torch.compiler.is_compiling() or type(rows) is not Tensor:  # traced or fake tensors: supported in bf16 only
        return weight.dtype == torch.bfloat16
    return weight.dtype in (torch.bfloat16, torch.float16, torch.float32)


# One matrix multiplication per group, for what `F.grouped_mm` does not support. `torch.compile` sees a single operator:
# it cannot trace a loop whose bounds are values of a tensor.
@torch.library.custom_op("plait::looped_linear", mutates_args=())
def looped_linear(rows: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    """Do `grouped_linear` by one matrix multiplication per group; rows after the last end are zeros."""
    product = rows.new_zeros(len(rows), weight.shape[1])
    for group, (start, end) in enumerate(_groups(group_ends)):
        torch.mm(rows[start:end], weight[group].t(), out=product[start:end])
    return product


@torch.library.custom_op("plait::looped_linear_backward", mutates_args=())
def _looped_backward(grad: Tensor, rows: Tensor, weight: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the matrices."""
    grad_rows, grad_weight = torch.zeros_like(rows), torch.zeros_like(weight)
    for group, (start, end) in enumerate(_groups(group_ends)):
        torch.mm(grad[start:end], weight[group], out=grad_rows[start:end])
        torch.mm(grad[start:end].t(), rows[start:end], out=grad_weight[group])
    return grad_rows, grad_weight


def _groups(group_ends: Tensor) -> list[tuple[int, int]]:
    stops = group_ends.tolist()
    return list(zip([0, *stops], stops, strict=False))


@looped_linear.register_fake
def _(rows: Tensor, weight: Tensor, group_ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_looped_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, group_ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_looped_backward(grad.contiguous(), *ctx.saved_tensors), None


looped_linear.register_autograd(_back, setup_context=_keep)

# Routing, and load balancing.
#
# [Note: balance does not depend on the layout]
# An expert's load is the number of tokens that chose it. Which tokens are in one forward pass depends on the layout: on
# the size of a micro-batch, and on the number of ranks. So nothing here is averaged over one forward pass.
#
# - The balance loss, the z loss and the capacity are computed for each row of a batch; only context parallelism splits
#   a row (see `Router.sum_over_row`). A row's *penalty* is the weighted sum of its balance loss and its z loss. The
# model   multiplies it by the row's number of targets: so penalties are summed over rows as the loss is, and divided by
# the   number of all targets, as the loss is, they become a mean over rows. - The bias is updated once per step, from
# the experts' loads in the whole step: each rank counts them, they are summed   over ranks as integers, and compared
# with their mean. Only the sign of the difference is used.
#
# The backward pass adds a row to the load, and only if the row's penalty has a gradient that is not zero. So a row is
# counted once if its forward pass is recomputed, and not at all without a backward pass, without targets, or if it is
# padding: exactly the rows that count in the loss are counted.


class Routing(NamedTuple):
    """The experts of the tokens of one forward pass."""

    choices: Tensor
    """(tokens, top_k): indices of experts; `num_experts` is a choice that was dropped."""
    weights: Tensor
    """(tokens, top_k), fp32: the weights of the experts' outputs."""
    penalty: Tensor
    """(rows,), fp32: weighted balance and z loss; zero outside of training."""


class Router(nn.Module):
    """Scores every expert for every token, in fp32, and chooses the best `top_k`.

    See [Note: balance does not depend on the layout].
    """

    bias: Tensor | None
    """Added to the scores for choosing, not for weighting; updated by `balance`."""
    load: Tensor | None
    """The number of tokens that chose each expert on this rank since the last step."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        if config.top_k > config.experts:
            raise ModelError(
                f"model.top_k={config.top_k} is more than model.experts={config.experts}; lower model.top_k"
            )
        self.num_experts, self.top_k = config.experts, config.top_k
        self.score, self.normalize = config.score, config.normalize
        self.balance_loss, self.z_loss = config.balance_loss, config.z_loss
        self.bias_rate = config.bias_rate
        self.capacity_factor = config.capacity_factor
        self.sum_over_row: Callable[[Tensor], Tensor] = _as_it_is
        """Returns sums over whole rows, given those over their tokens on this rank; context parallelism replaces it."""
        self.weight = nn.Parameter(torch.empty(config.experts, config.dim))
        balanced = config.bias_rate > 0
        self.register_buffer("bias", torch.zeros(config.experts) if balanced else None)
        self.register_buffer(
            "load", torch.zeros(config.experts, dtype=torch.int64) if balanced else None, persistent=False
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routing:
        """Choose experts for the tokens of `x` (rows, tokens, dim).

        `real` (rows, tokens) says which tokens are not padding: only these contribute to loads and penalties. Without
        it, all do.
        """
        # In fp32 whatever the compute dtype: in bf16 different scores become ties, and the choice would change.
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        index = (scores if self.bias is None else scores + self.bias).topk(self.top_k).indices
        weights = scores.gather(-1, index)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, True)
        counted = chosen if real is None else chosen & real[..., None]
        penalty = self._penalty(logits, scores, counted, real)
        if self.load is not None:
            # Where a row is split over ranks, this rank's part counts even if it has no targets itself: `sum_over_row`
            # gives all parts the gradient of the sum.
            penalty = penalty + self.sum_over_row(_Tally.apply(_nothing(scores), counted.sum(1), self.load))  # type: ignore[no-untyped-call]
        if self.training and self.capacity_factor is not None:
            index = self._drop(index, chosen)
        return Routing(index.flatten(0, 1), weights.flatten(0, 1), penalty)

    def _penalty(self, logits: Tensor, scores: Tensor, chosen: Tensor, real: Tensor | None) -> Tensor:
        """Return the weighted sum of balance loss and z loss of each row; zeros outside of training."""
        rows, tokens, experts = scores.shape
        if not self.training or not (self.balance_loss or self.z_loss):
            return _nothing(scores)
        shares = scores / scores.sum(-1, keepdim=True)
        squares = logits.logsumexp(-1, keepdim=True).square()
        lengths = scores.new_full((rows, 1), tokens)
        if real is not None:
            shares, squares, lengths = shares * real[..., None], squares * real[..., None], real.sum(1, keepdim=True)
        sums = torch.cat([chosen.sum(1).float(), shares.sum(1), squares.sum(1), lengths.float()], 1)
        sums = self.sum_over_row(sums)
        counts, shares, squares, length = torch.split(sums, [experts, experts, 1, 1], 1)
        balance = (counts * shares).sum(1, keepdim=True) * (experts / self.top_k) / length.square()
        return torch.add(self.balance_loss * balance, squares / length, alpha=self.z_loss).squeeze(1)

    def _drop(self, index: Tensor, chosen: Tensor) -> Tensor:
        """Return the choices; those that exceed their expert's capacity in the row are replaced by `num_experts`."""
        capacity = math.ceil(self.capacity_factor * chosen.shape[1] * self.top_k / self.num_experts)  # type: ignore[operator]
        rank_in_expert = chosen.cumsum(1).gather(-1, index)
        return index.where(rank_in_expert <= capacity, self.num_experts)


def balance(routers: list[Router], loads: Tensor) -> None:
    """Raise the bias of each expert whose load is below the mean, and lower those of the others, in place.

    `loads` (routers, experts) are the loads of a step, summed over all ranks.
    """
    # Loads are multiplied by the number of experts, not their sum divided by it, so that all numbers are integers.
    above = loads.sum(1, keepdim=True) - loads * loads.shape[1]
    for router, sign in zip(routers, above.sign(), strict=True):
        assert router.bias is not None
        router.bias.add_(sign, alpha=router.bias_rate)


class _Tally(torch.autograd.Function):
    """Returns `penalty` unchanged; its backward pass adds the choices of rows with a nonzero gradient to `load`."""

    @staticmethod
    def forward(ctx: Any, penalty: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        """`counts` (rows, experts) are the choices of each row."""
        ctx.save_for_backward(counts)
        ctx.load = load
        return penalty.view_as(penalty)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Add to the load, and return the gradient unchanged."""
        (counts,) = ctx.saved_tensors
        ctx.load.add_((counts * (grad != 0)[:, None]).sum(0))
        return grad, None, None


def _nothing(scores: Tensor) -> Tensor:
    """Return zeros (rows,) that depend on the scores, so that a gradient arrives at them in the backward pass."""
    return scores[:, :0].sum((1, 2))


def _as_it_is(sums: Tensor) -> Tensor:
    return sums


class RoutedStream(NamedTuple):
    """The output of a block: the hidden states, and for each row the sum of the penalties of all routers so far.

    A pipeline stage sends both to the next one, because the gradient of the penalties has to reach each router.
    """

    hidden: Tensor
    """(rows, tokens, dim)"""
    penalty: Tensor
    """(rows,), fp32"""

    @classmethod
    def of(cls, x: Tensor | tuple[Tensor, Tensor]) -> RoutedStream:
        """Return `x` as a `RoutedStream`; if `x` is the embedding's output, the penalties are zero.

        These zeros depend on the hidden states, so that they have a gradient at every boundary of pipeline stages.
        """
        return cls(*x) if isinstance(x, tuple) else cls(x, x[:, :0].float().sum((1, 2)))


class MixtureOfExperts(nn.Module):
    """A feed-forward of many experts, of which each token uses `top_k`, and of shared experts, which all tokens use."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        hidden = expert_dim(config)
        self.router = Router(config)
        self.experts = Experts(
            config.experts, config.dim, hidden, layers=config.layers, drops=config.capacity_factor is not None
        )
        shared = config.shared_experts * hidden
        self.shared = SwiGLU(config.dim, shared, layers=config.layers) if shared else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output for `x` (rows, tokens, dim), and each row's penalty; only `real` tokens count for it."""
        index, weights, penalty = self.router(x, real)
        hidden = x.flatten(0, 1)
        if torch.is_autocast_enabled(x.device.type):  # once, before rows are repeated and sent to other ranks
            hidden = hidden.to(torch.get_autocast_dtype(x.device.type))
        y = self.experts(hidden, index, weights).unflatten(0, x.shape[:2])
        return (y if self.shared is None else y + self.shared(x)), penalty


class MoeBlock(nn.Module):
    """A pre-norm transformer layer: attention, then a feed-forward, dense or a mixture of experts."""

    def __init__(self, config: MoeConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.heads, config.kv_heads or config.heads, layers=config.layers)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn: MixtureOfExperts | SwiGLU = (
            MixtureOfExperts(config)
            if is_mixture(config, layer)
            else SwiGLU(config.dim, ffn_dim(config), layers=config.layers)
        )

    def forward(self, x: Tensor, shared: Shared, penalty: Tensor) -> RoutedStream:
        """Return the hidden states (rows, tokens, dim) after the layer, and the penalties (rows) plus this layer's."""
        x = x + self.attention(self.attention_norm(x), shared)
        if not isinstance(self.ffn, MixtureOfExperts):
            return RoutedStream(x + self.ffn(self.ffn_norm(x)), penalty)
        answer, charged = self.ffn(self.ffn_norm(x), real=shared.real)
        return RoutedStream(x + answer, penalty + charged)


def is_mixture(config: MoeConfig, layer: int) -> bool:
    """Whether a layer's feed-forward is a mixture of experts: the last one of each `moe_every` layers."""
    return (layer + 1) % config.moe_every == 0


def expert_dim(config: MoeConfig) -> int:
    """Return the width of one expert: as configured, or that of the dense feed-forward."""
    return config.expert_dim or ffn_dim(config)


class Moe(Llama):
    """A Llama with mixtures of experts; implements `models.common.protocol.LanguageModel`.

    In training the loss includes the routers' penalties, each row's times its number of targets; see
    [Note: balance does not depend on the layout]. In evaluation it is the cross-entropy alone.
    """

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (MoeBlock,)

    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)

    def make_block(self, layer: int) -> nn.Module:
        """Return one layer, with a mixture of experts or a dense feed-forward."""
        return MoeBlock(self.config, layer)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | tuple[Tensor, Tensor] | None = None,
        real: Tensor | None = None,
    ) -> Tensor | RoutedStream | LossTerm:
        """Return the loss if labels are given, else the logits. Only `real` tokens contribute to the penalties.

        A pipeline stage without the first layers takes `hidden` as its input; one without the head returns a
        `RoutedStream`.
        """
        shared = self.shared(input_ids, positions, document_ids)
        shared.real = real
        x, penalty = RoutedStream.of(self.embedding(input_ids) if hidden is None else hidden)
        for block in self.blocks:
            x, penalty = block(x, shared, penalty)
        if self.head is None:
            return RoutedStream(x, penalty)
        tied = self.embedding.weight if self.config.tie_embeddings else None
        answer: Tensor | LossTerm = self.head(self.norm(x), labels, tied)
        if labels is None or not isinstance(answer, LossTerm):
            return answer
        targets = (labels != IGNORE_INDEX).sum(1)
        return LossTerm(answer.sum + (penalty * targets).sum(), answer.count)

    def init_weights(self, module: nn.Module) -> None:
        """Initialize the direct parameters and buffers of one module."""
        if isinstance(module, Experts):
            module.reset_parameters()
        else:
            init_lm_module(module)
        for buffer in module.buffers(recurse=False):  # of a router
            nn.init.zeros_(buffer)

    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel plan: that of a Llama; shared experts are split like a dense feed-forward.

        The other experts are distributed by expert parallelism, which includes the tensor-parallel ranks.
        """
        feed_forward: dict[str, str] = {}
        for layer in range(self.config.layers):
            styles = self._mixture_plan() if is_mixture(self.config, layer) else DENSE
            feed_forward |= {f"blocks.{layer}.ffn{suffix}": style for suffix, style in styles.items()}
        return decoder_plan(feed_forward)

    def _mixture_plan(self) -> dict[str, str]:
        shared = {f".shared{suffix}": style for suffix, style in DENSE.items()} if self.config.shared_experts else {}
        return {"": "whole_sequence", **shared}

    @torch.no_grad()
    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor = True) -> None:
        """Update the routers' biases by the loads of the last step, if the step `updated` the weights.

        `updated` may be a tensor on the device; the host does not wait for it. Call this on every rank after every
        step, with the group of all ranks that have the same parameters and other tokens; None if there is one rank.
        Afterwards the biases are the same on all of these ranks.
        """
        routers = [module for module in self.modules() if isinstance(module, Router) and module.load is not None]
        if not routers:
            return
        loads = torch.stack([router.load for router in routers if router.load is not None])
        for router in routers:
            assert router.load is not None
            router.load.zero_()
        if isinstance(updated, Tensor):
            loads *= updated  # a load of zero changes no bias
        elif not updated:
            return
        if group is not None:
            dist.all_reduce(loads, group=group)
        balance(routers, loads)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token, which uses `top_k` experts of each mixture."""
        config = self.config
        lookups = [] if config.tie_embeddings else [self.embedding]
        total = decoder_flops_per_token(self, lookups, layers=config.layers, dim=config.dim, seq_len=seq_len)
        routed = sum(p.numel() for m in self.modules() if isinstance(m, Experts) for p in m.parameters())
        return total - 6.0 * routed * (config.experts - config.top_k) / config.experts


_MIXTRAL: dict[str, Any] = {"vocab_size": 32000, "kv_heads": 8, "rope_base": 1e6, "experts": 8, "top_k": 2}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {
            "vocab_size": 256,
            "dim": 64,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "seq_len": 64,
            "experts": 4,
            "expert_dim": 64,
        },
        "8x7b": _MIXTRAL | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336, "seq_len": 32768},
        "8x22b": _MIXTRAL | {"dim": 6144, "layers": 56, "heads": 48, "ffn_dim": 16384, "seq_len": 65536},
    }
)

"""Named sizes, as keywords of `MoeConfig`. The larger ones have the shapes of Mixtral."""

# Mixtral weights in the names of `transformers`.
#
# In Mixtral's files, each expert's matrices are separate tensors; here, and in the modules of `transformers`, the
# matrices of all experts are stacked in one tensor. Folders of either form can be loaded; separate tensors are written.


_STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
"""Mixtral's names for the matrices of an expert, and Plait's."""
_ROUTER = re.compile(r"\.(?:block_sparse_moe|mlp)\.gate\.")
_ONE = re.compile(r"\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w[123])\.weight$")
_STACKED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
_PIECE = re.compile(r"^(.*\.experts\.(?:gate|up|down))\.(\d+)$")

UNUSED = llama.UNUSED
"""Stored tensors, in the names of `transformers`, that a `Moe` computes itself."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` Mixtral folder into a `Moe` of the same sizes; see `stream_weights`.

    At most one layer's stacks of experts are in memory at a time.
    """
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    if not any(_STACKED.search(name) for name in weight_files(path)):
        model, put = _Unstacked(model), _Stacking(model, put)
    return stream_weights(
        model, path, put, translate=from_transformers, may_miss=[r"\.router\.bias$"], may_skip=[*UNUSED, *tied]
    )


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Yield Plait's tensors for one of `MixtralForCausalLM`.

    One expert's matrix becomes a slice of a stack, named with the expert's index: `….experts.gate.3`.
    """
    ((name, tensor),) = llama.from_transformers(_ROUTER.sub(".ffn.router.", name), tensor)
    if one := _ONE.search(name):
        expert, matrix = one.groups()
        yield f"{name[: one.start()]}.ffn.experts.{_STACKS[matrix]}.{expert}", tensor
    elif stacked := _STACKED.search(name):
        stem = f"{name[: stacked.start()]}.ffn.experts."
        if stacked[1] == "down":
            yield stem + "down", tensor
        else:
            yield from zip((stem + "gate", stem + "up"), tensor.chunk(2, 1), strict=True)
    else:
        yield name, tensor


def made_from_transformers(shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """Return how to compute each of Plait's tensors from stored ones with these names and shapes."""
    made: dict[str, Made] = {}
    stacks: dict[str, dict[int, Made]] = {}
    for name, tensor in by_translation(from_transformers, shapes).items():
        if piece := _PIECE.match(name):
            stacks.setdefault(piece[1], {})[int(piece[2])] = tensor
        else:
            made[name] = tensor
    for name, pieces in stacks.items():
        made[name] = Made(tuple(tensor for expert in sorted(pieces) for tensor in pieces[expert].sources), _stack)
    return made


def to_transformers(config: MoeConfig) -> dict[str, Made]:
    """Return how to compute each tensor of `MixtralForCausalLM`; raise a `ModelError` if no Mixtral can do the same."""
    _refuse_what_mixtral_lacks(config)
    made = {name: tensor for name, tensor in llama.to_transformers(config).items() if ".mlp." not in name}
    for layer in range(config.layers):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"blocks.{layer}.ffn"
        made[f"{theirs}.gate.weight"] = Made((f"{ours}.router.weight",), same)
        for expert in range(config.experts):
            for matrix, stack in _STACKS.items():
                name = f"{theirs}.experts.{expert}.{matrix}.weight"
                made[name] = Made((f"{ours}.experts.{stack}",), partial(_one, expert))
    return made


def describe(config: MoeConfig) -> dict[str, Any]:
    """Return the `config.json` with which `transformers` builds the same model."""
    _refuse_what_mixtral_lacks(config)
    dense = llama.describe(config)
    for key in ("attention_bias", "mlp_bias"):
        del dense[key]
    return {
        **dense,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": expert_dim(config),
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": None,
        "router_aux_loss_coef": config.balance_loss,
    }


def from_description(hf_config: Mapping[str, Any]) -> MoeConfig:
    """Return Plait's configuration for a Mixtral's `config.json`; raise a `ModelError` if no `Moe` can do the same."""
    supported = {"model_type": "mixtral", "sliding_window": None}
    for key, needed in supported.items():
        if hf_config.get(key) != needed:
            raise ModelError(
                f"config.json has {key} {hf_config.get(key)!r}, but Plait's moe supports only {needed!r}; "
                "use `model.type: hf`"
            )
    dense = llama.from_description({**hf_config, "model_type": "llama"}).model_dump(exclude={"type"})
    return MoeConfig(**dense, experts=hf_config["num_local_experts"], top_k=hf_config["num_experts_per_tok"])


def _refuse_what_mixtral_lacks(config: MoeConfig) -> None:
    mixtral = {"moe_every": 1, "shared_experts": 0, "score": "softmax", "normalize": True, "bias_rate": 0.0}
    for key, needed in mixtral.items():
        if getattr(config, key) != needed:
            raise ModelError(
                f"model.{key}={getattr(config, key)} is not supported by the Mixtral of transformers, only {needed}; "
                "write a state dict with `--to torch`, or a checkpoint with `--to plait`"
            )


def _stack(*experts: Tensor) -> Tensor:
    return torch.stack(experts)


def _one(expert: int, stack: Tensor) -> Tensor:
    return stack[expert]


class _Unstacked(nn.Module):
    """The names and shapes of a model's tensors as they are in files: each expert's matrices separate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if _PIECE.match(f"{name}.0"):
                slice_ = torch.empty(tensor.shape[1:], device="meta")
                self._tensors |= {f"{name}.{expert}": slice_.clone() for expert in range(tensor.shape[0])}
            else:
                self._tensors[name] = tensor

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return tensors with the names and shapes to load."""
        return self._tensors


class _Stacking:
    """Calls `put` with each tensor; an expert's matrix is held until all experts' are loaded, and these are stacked."""

    def __init__(self, model: nn.Module, put: Put) -> None:
        self._experts = {name: t.shape[0] for name, t in model.state_dict().items() if _PIECE.match(f"{name}.0")}
        self._put = put
        self._pieces: dict[str, dict[int, Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        piece = _PIECE.match(name)
        if piece is None:
            self._put(name, tensor)
            return
        pieces = self._pieces.setdefault(piece[1], {})
        pieces[int(piece[2])] = tensor
        if len(pieces) == self._experts[piece[1]]:
            del self._pieces[piece[1]]
            self._put(piece[1], torch.stack([pieces[expert] for expert in range(len(pieces))]))
