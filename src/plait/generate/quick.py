"""One token for each row of a Llama, in five kernels a layer.

Reading a prompt, a model is busy computing; writing, it waits for weights and for the next kernel to begin. So here the
modules of a Llama are not called one by one: their weights go through `ops.skinny` and `ops.decode_attention`. What is
computed is the same, up to rounding. A model with anything unusual about it is not taken, and keeps its own step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.models.common.attention import Attention, attend
from plait.models.common.head import LMHead
from plait.models.common.rope import rotary_table, rotate_both
from plait.models.fused import FusedAttention, FusedLlamaBlock, FusedRMSNorm, FusedSwiGLU, fuse, rotate_together
from plait.models.llama.block import LlamaBlock, SwiGLU
from plait.models.llama.model import Llama
from plait.ops.decode_attention import attend_cached, takes
from plait.ops.skinny import Norm, add, gated, look_up, make_counters, project
from plait.ops.triton import has_kernels

_PARTS = (LlamaBlock, Attention, SwiGLU, nn.RMSNorm)
_FUSED = (FusedLlamaBlock, FusedAttention, FusedSwiGLU, FusedRMSNorm)
_KNOWN = frozenset((Llama, nn.ModuleList, nn.Embedding, nn.Linear, LMHead, *_PARTS, *_FUSED))
_DTYPES = (torch.bfloat16, torch.float32)
"""fp16 is not among them: see [Note: a stream carries its norm]."""


def takes_model(model: nn.Module) -> bool:
    """Whether a model is a Llama of which nothing is changed, spread out or left out, on a device with kernels."""
    if type(model) is not Llama or model.head is None or not all(map(_is_usual, model.modules())):
        return False
    params = list(model.parameters())
    first = params[0]
    alike = all(type(p) is nn.Parameter and p.dtype == first.dtype and p.device == first.device for p in params)
    autocast = torch.is_autocast_enabled(first.device.type)
    if autocast and torch.get_autocast_dtype(first.device.type) != first.dtype:
        return False
    head_dim = model.config.dim // model.config.heads
    return alike and first.dtype in _DTYPES and has_kernels(first) and takes(head_dim, first.dtype)


def _is_usual(module: nn.Module) -> bool:
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    if type(module) not in _KNOWN or any(hooks) or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    if isinstance(module, Attention):
        return module.attend is attend and module.rotate in (rotate_both, rotate_together)
    if isinstance(module, nn.RMSNorm):
        return module.weight is not None
    return getattr(module, "bias", None) is None


@contextmanager
def fused(model: nn.Module) -> Iterator[None]:
    """A model that `takes_model` takes, with the forms of `models.fused` for as long as it reads prompts."""
    usual = [(part, part.__class__, vars(part).get("rotate")) for part in model.modules()]
    fuse(model)
    try:
        yield
    finally:
        for part, kind, rotate in usual:
            part.__class__ = kind
            if isinstance(part, Attention):
                part.rotate = rotate  # type: ignore[assignment]


class QuickStep:
    """The step of one batch: what it needs beside weights and cache. Reads the live weights each time."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        """`model`: one that `takes_model` takes; `slots`: places of the cache."""
        self._model = cast(Llama, model)
        config, device = self._model.config, self._model.embedding.weight.device
        self._counters = make_counters(device)
        table = rotary_table(torch.arange(slots, device=device)[None], config.dim // config.heads, config.rope_base)
        self._cos, self._sin = (each[0, 0] for each in table)

    def __call__(self, tokens: Tensor, places: Tensor, caches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (rows, vocabulary) behind one token for each row, at its place.

        A layer's cache is its keys and its values, and has those of the new tokens afterwards.
        """
        model, counters = self._model, self._counters
        blocks: list[Any] = list(model.blocks)
        norms = [_norm(norm) for block in blocks for norm in (block.attention_norm, block.ffn_norm)]
        norms.append(_norm(model.norm))
        stream = look_up(tokens, model.embedding.weight, norms[0])
        for layer, (block, (keys, values)) in enumerate(zip(blocks, caches, strict=True)):
            attention, ffn = block.attention, block.ffn
            mixed = project(stream, [each.weight for each in (attention.q, attention.k, attention.v)], counters)
            y = attend_cached(mixed, self._cos, self._sin, keys, values, places, counters)
            stream = add(stream, y, attention.out.weight, norms[2 * layer + 1], counters)
            y = gated(stream, ffn.gate.weight, ffn.up.weight)
            stream = add(stream, y, ffn.down.weight, norms[2 * layer + 2], counters)
        head = model.embedding.weight if model.head.weight is None else model.head.weight
        return project(stream, [head], counters)


def _norm(module: Any) -> Norm:
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(module.weight, eps)
