"""Generation with Plait's own decoders and a KV cache.

[Note: rows are right-padded] Prompts of unequal length start at position 0 and are padded at their end. So prefill is
causal attention with the positions, the kernel and the (absent) mask of training. The padding's keys and values are
stored in the cache after the end of each row, where a mask hides them until new tokens overwrite them. The next token
of each row is stored at that row's own end.

The models need no code for a cache: the attention function of `Attention` is replaced by one with a cache, and restored
afterwards; context parallelism replaces it in the same way. Where `LlamaDecodeStep` computes single tokens, the
replaced function is used for prefill only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from plait.generate.decoder import Call, GrowingDecoder, lengths_of, pad_rows
from plait.kernels import has_kernels
from plait.kernels.decode import (
    CounterRNG,
    DecoderWeights,
    DecodeStep,
    LayerWeights,
    Norm,
    RowPositions,
    supports_head,
)
from plait.models import (
    Attention,
    FusedAttention,
    FusedLlamaBlock,
    FusedRMSNorm,
    FusedSwiGLU,
    Llama,
    LlamaBlock,
    LMHead,
    SwiGLU,
    attend,
    fuse,
    rotary_table,
    rotate_both,
    rotate_together,
)
from plait.torch_internals import compiled_call, forward_hooks

# One token per row of a Llama, through `plait.kernels.decode`.
#
# Prefill is bound by computation; decoding is bound by reading the weights and by kernel launches. So for decoding, the
# modules of a Llama are not called: their weights are passed to the kernels of `DecodeStep`. The results are the same,
# up to rounding. A model with modified modules (hooks, adapters, subclasses) is called as usual.


_PLAIN_MODULES = (LlamaBlock, Attention, SwiGLU, nn.RMSNorm)
_FUSED_MODULES = (FusedLlamaBlock, FusedAttention, FusedSwiGLU, FusedRMSNorm)
_KNOWN_MODULES = frozenset((Llama, nn.ModuleList, nn.Embedding, nn.Linear, LMHead, *_PLAIN_MODULES, *_FUSED_MODULES))
_DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that the decode kernels support. fp16 has too small a range: see [Note: a stream carries its norm]."""


def can_use_decode_kernels(model: nn.Module) -> bool:
    """Whether a model is a Llama that is unmodified, not sharded, and has all layers, on a device with kernels."""
    if type(model) is not Llama or model.head is None or not all(map(_is_unmodified, model.modules())):
        return False
    params = list(model.parameters())
    first = params[0]
    alike = all(type(p) is nn.Parameter and p.dtype == first.dtype and p.device == first.device for p in params)
    autocast = torch.is_autocast_enabled(first.device.type)
    if autocast and torch.get_autocast_dtype(first.device.type) != first.dtype:
        return False
    head_dim = model.config.dim // model.config.heads
    return alike and first.dtype in _DTYPES and has_kernels(first) and supports_head(head_dim, first.dtype)


def _is_unmodified(module: nn.Module) -> bool:
    changed = any(forward_hooks(module)) or "forward" in vars(module) or compiled_call(module) is not None
    if type(module) not in _KNOWN_MODULES or changed:
        return False
    if isinstance(module, Attention):
        return module.attend is attend and module.rotate in (rotate_both, rotate_together)
    if isinstance(module, nn.RMSNorm):
        return module.weight is not None
    return getattr(module, "bias", None) is None


@contextmanager
def fused_for_prefill(model: nn.Module) -> Iterator[None]:
    """Return a context in which the modules of a model are those of `models.fused`, for prefill.

    The model must be one that `can_use_decode_kernels`.
    """
    originals = [(module, module.__class__, vars(module).get("rotate")) for module in model.modules()]
    fuse(model)
    try:
        yield
    finally:
        for module, original, rotate in originals:
            module.__class__ = original
            if isinstance(module, Attention):
                module.rotate = rotate  # type: ignore[assignment]


class LlamaDecodeStep(DecodeStep):
    """The decode step of one batch, for a model that `can_use_decode_kernels`; each step reads the current weights."""

    def __init__(self, model: nn.Module, slots: int, *, prefetch_bytes: int | None = None, early: bool = True) -> None:
        """`slots` is the length of the cache; see `DecodeStep` for the options."""
        llama = cast(Llama, model)
        config, device = llama.config, llama.embedding.weight.device
        cos, sin = rotary_table(torch.arange(slots, device=device)[None], config.dim // config.heads, config.rope_base)
        weights = partial(_decoder_weights, llama)
        super().__init__(weights, cos[0, 0], sin[0, 0], prefetch_bytes=prefetch_bytes, early=early)


def _decoder_weights(model: Llama) -> DecoderWeights:
    embedding, head = model.embedding.weight, model.head.weight
    layers = [_layer_weights(block) for block in model.blocks]
    return DecoderWeights(embedding, layers, _norm(model.norm), embedding if head is None else head)


def _layer_weights(block: Any) -> LayerWeights:
    attention, ffn = block.attention, block.ffn
    qkv = attention.q.weight, attention.k.weight, attention.v.weight
    norms = _norm(block.attention_norm), _norm(block.ffn_norm)
    return LayerWeights(norms[0], qkv, attention.out.weight, norms[1], ffn.gate.weight, ffn.up.weight, ffn.down.weight)


def _norm(module: Any) -> Norm:
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(module.weight, eps)


SLOTS = 64
"""The cache length is a multiple of this: kernels with a mask need aligned rows."""
PREFILL_TOKENS = 8192
"""Prompt tokens per prefill call: enough that the device works for longer than the launches take. More would only need
more memory and more padding."""


class KVCacheRows:
    """The positions of the rows and the attention mask of a KV cache; one object for all layers.

    A *slot* is the place of one token of a row in the cache.
    """

    def __init__(self, lengths: Tensor, row_ends: Tensor, dtype: torch.dtype) -> None:
        self.slots = -(-int(row_ends.max()) // SLOTS) * SLOTS
        self.at = RowPositions(lengths, row_ends - 1, torch.empty_like(lengths))
        self.numbers = torch.arange(len(lengths), device=lengths.device)
        self.prefilling: slice | None = None
        """The rows that are being prefilled; None: a step appends one token to each row."""
        slots = torch.arange(self.slots, device=lengths.device)
        self.mask = torch.zeros(len(lengths), self.slots, device=lengths.device, dtype=dtype)
        self.mask.masked_fill_(slots >= lengths[:, None], float("-inf"))

    def open(self) -> None:
        """Advance the position of each row by one, and unmask the slot of its next token."""
        self.at.advance()
        self.mask.scatter_(1, self.at.positions[:, None], 0.0)

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""
        self.at, self.mask = RowPositions(*(tensor[rows] for tensor in self.at)), self.mask[rows]
        self.numbers = self.numbers[: len(rows)]

    def extend(self, other: KVCacheRows) -> None:
        """Append the rows of another cache; both get as many slots as the longer one has."""
        self.slots = max(self.slots, other.slots)
        self.at = RowPositions(*(torch.cat(pair) for pair in zip(self.at, other.at, strict=True)))
        masks = [F.pad(m, (0, self.slots - m.shape[1]), value=float("-inf")) for m in (self.mask, other.mask)]
        self.mask = torch.cat(masks)
        self.numbers = torch.arange(len(self.mask), device=self.mask.device)


class CachedAttention:
    """Attention of one layer over its KV cache."""

    def __init__(self, attend: Any, cache: KVCacheRows) -> None:
        self._attend = attend
        self.cache = cache
        self.keys = self.values = torch.empty(0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float = 0.0
    ) -> Tensor:
        """Return attention over (batch, heads, tokens, head_dim), as `attend` does, and update the cache."""
        cache = self.cache
        if cache.prefilling is not None:
            if not self.keys.numel():
                shape = (len(cache.numbers), k.shape[1], cache.slots, k.shape[3])
                self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
            for kept, new in ((self.keys, k), (self.values, v)):
                kept[cache.prefilling, :, : k.shape[2]] = new
            answer: Tensor = self._attend(q, k, v, mask, dropout)
            return answer
        self.keys[cache.numbers, :, cache.at.positions] = k[:, :, 0]
        self.values[cache.numbers, :, cache.at.positions] = v[:, :, 0]
        # With GQA, the queries of a group are passed as tokens of one head, so that no key or value has to be repeated.
        batch, heads, _, width = q.shape
        grouped = q.reshape(batch, k.shape[1], -1, width)
        allowed = cache.mask.to(q.dtype)[:, None, None].expand(-1, k.shape[1], grouped.shape[2], -1)
        y = F.scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=allowed)
        return y.reshape(batch, heads, 1, width)

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def _concatenated(first: Tensor, second: Tensor, slots: int) -> Tensor:
    """Return two caches (rows, heads, slots, features), padded to `slots` slots and concatenated along the rows."""
    rows = first.new_zeros(len(first) + len(second), first.shape[1], slots, first.shape[3])
    rows[: len(first), :, : first.shape[2]] = first
    rows[len(first) :, :, : second.shape[2]] = second
    return rows


def chunks_of(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """Return slices of consecutive prompts that have at most `PREFILL_TOKENS` tokens each, padding included.

    Generation sorts prompts by length, so a chunk needs less padding than all prompts together would.
    """
    chunks, begin, longest = [], 0, 0
    for number, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if begin < number and longest * (number + 1 - begin) > PREFILL_TOKENS:
            chunks.append(slice(begin, number))
            begin, longest = number, len(prompt)
    return [*chunks, slice(begin, len(prompts))]


class CachedDecoder(GrowingDecoder):
    """The decoder of models whose attention is Plait's own; see [Note: rows are right-padded]."""

    def __init__(self, model: nn.Module, device: torch.device, *, call: Call | None = None) -> None:
        """`call` is used instead of calling the model directly, if given."""
        self._model = model
        self._call = model if call is None else call
        self._calls_directly = call is None
        self._device = device
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self._original_attends: list[Any] = []
        self._layers: list[CachedAttention] = []
        self._cache: KVCacheRows | None = None
        self._step: LlamaDecodeStep | None = None
        self._last: Tensor | None = None
        self._warm: set[Hashable] = set()
        self._hook: Any = None
        self._head: Any = model.head
        # A mixture of experts may have data-dependent sizes, and `call` may gather sharded weights: neither can be
        # captured in a CUDA graph.
        mixed = any(type(chunk).__name__ == "Experts" for chunk in model.modules())
        self.capturable = device.type == "cuda" and call is None and not mixed

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Prefill the prompts, and return the logits of the last token of each."""
        self.close()
        self._cache = self._cache_for(prompts, max_new_tokens)
        if self._calls_directly and can_use_decode_kernels(self._model):
            self._step = LlamaDecodeStep(self._model, self._cache.slots)
        self._original_attends = [attention.attend for attention in self._attentions]
        self._layers = [CachedAttention(attend, self._cache) for attend in self._original_attends]
        for attention, layer in zip(self._attentions, self._layers, strict=True):
            attention.attend = layer
        # Logits of every position would be by far the largest tensor, and only those of the last token are needed.
        self._hook = self._head.register_forward_pre_hook(self._only_last)
        return self._prefill(self._cache, prompts)

    def add(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Prefill further prompts into a separate cache, append it to the batch's, and return their last logits."""
        cache, kept = self._running(), self._kv_caches()
        fresh = self._cache_for(prompts, max_new_tokens)
        for layer in self._layers:
            layer.cache, layer.keys, layer.values = fresh, torch.empty(0), torch.empty(0)
        try:
            logits = self._prefill(fresh, prompts)
            slots = max(cache.slots, fresh.slots)
            for number, layer in enumerate(self._layers):  # layer by layer, since both copies take memory
                keys, values = kept[number]
                kept[number] = (_concatenated(keys, layer.keys, slots), _concatenated(values, layer.values, slots))
                layer.keys = layer.values = torch.empty(0)
            cache.extend(fresh)
        finally:
            for layer, (keys, values) in zip(self._layers, kept, strict=True):
                layer.cache, layer.keys, layer.values = cache, keys, values
        if self._step is not None:
            self._step = LlamaDecodeStep(self._model, cache.slots)
        return logits

    def _cache_for(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> KVCacheRows:
        lengths = lengths_of(prompts, self._device)
        dtype = next(self._attentions[0].parameters()).dtype  # a quantized matrix is not a parameter
        return KVCacheRows(lengths, lengths + torch.tensor(max_new_tokens, device=self._device), dtype)

    def _prefill(self, cache: KVCacheRows, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Prefill the prompts into a cache, and return the logits of the last token of each."""
        logits: list[Tensor] = []
        try:
            with fused_for_prefill(self._model) if self._step is not None else nullcontext():
                # Ranks that share a model must all call it equally often, so they do not split their prompts.
                for chunk in chunks_of(prompts) if self._calls_directly else [slice(0, len(prompts))]:
                    cache.prefilling, self._last = chunk, cache.at.lengths[chunk] - 1
                    logits.append(self._call(input_ids=pad_rows(prompts[chunk], self._device))[:, 0])
        finally:
            cache.prefilling = self._last = None
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, and return the logits of the next one."""
        cache = self._running()
        if self._step is not None:
            return self._step(tokens, cache.at, self._kv_caches())
        cache.open()
        logits: Tensor = self._call(input_ids=tokens[:, None], positions=cache.at.positions[:, None])
        return logits[:, 0]

    def step_greedy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token to each row, and return the most likely next one; the decode kernels store no logits."""
        if self._step is None:
            return super().step_greedy(tokens)
        return self._step.greedy(tokens, self._running().at, self._kv_caches())

    def step_sample(self, tokens: Tensor, temperature: float, rng: CounterRNG) -> tuple[Tensor, Tensor]:
        """Append one token to each row, and sample the next one; the decode kernels read the logits once for that."""
        if self._step is None:
            return super().step_sample(tokens, temperature, rng)
        return self._step.sample(tokens, self._running().at, self._kv_caches(), temperature, rng)

    def is_warm(self, way: Hashable) -> bool:
        """Whether steps of this batch size, cache length and `way` were done before; see `Decoder.is_warm`."""
        cache = self._running()
        size = (len(cache.numbers), cache.slots, way)
        known = size in self._warm
        self._warm.add(size)
        return known

    def _running(self) -> KVCacheRows:
        assert self._cache is not None, "begin comes first"
        return self._cache

    def _kv_caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self._layers]

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""
        self._running().keep(rows)
        for layer in self._layers:
            layer.keep(rows)

    def close(self) -> None:
        """Restore every layer's attention function, and free the cache."""
        for attention, original in zip(self._attentions, self._original_attends, strict=False):
            attention.attend = original
        if self._hook is not None:
            self._hook.remove()
        self._original_attends, self._layers, self._cache, self._hook, self._step = [], [], None, None, None

    def _only_last(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._last is None:
            return None
        hidden: Tensor = args[0]
        last = self._last[:, None, None].expand(-1, 1, hidden.shape[-1])
        return (hidden.gather(1, last), *args[1:])
