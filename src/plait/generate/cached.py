"""Plait's own decoders with a cache of keys and values.

[Note: rows are padded behind]
Prompts of unequal length start at the same place, and what fills them up comes after. So reading them is plainly
causal: the same positions, the same kernel and no mask, as in training. What the filling leaves in the cache lies
behind each row's end, where a mask hides it until a new token overwrites it. Every row writes at its own end.

The models know nothing of this. How an `Attention` mixes tokens is a function that can be exchanged, as context
parallelism does it; here one with a memory takes its place, and is taken out again. Where `quick` knows a shorter way
for single tokens, only prompts go this one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from plait.generate.decoder import Call, GrowingDecoder, lengths_of, padded
from plait.kernels import (
    AHEAD,
    EARLY,
    Ahead,
    At,
    CounterRNG,
    Norm,
    ResidualStream,
    add,
    ahead_of,
    attend_cached,
    drawn,
    gated,
    has_kernels,
    likeliest,
    look_up,
    make_counters,
    project,
    takes,
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

# One token for each row of a Llama, in five kernels a layer.
#
# Reading a prompt, a model is busy computing; writing, it waits for weights and for the next kernel to begin. So here
# the modules of a Llama are not called one by one: their weights go through `ops.skinny` and `ops.decode_attention`.
# What is computed is the same, up to rounding. A model with anything unusual about it is not taken, and keeps its own
# step.


_PARTS = (LlamaBlock, Attention, SwiGLU, nn.RMSNorm)
_FUSED = (FusedLlamaBlock, FusedAttention, FusedSwiGLU, FusedRMSNorm)
_KNOWN = frozenset((Llama, nn.ModuleList, nn.Embedding, nn.Linear, LMHead, *_PARTS, *_FUSED))
_DTYPES = (torch.bfloat16, torch.float32)
"""fp16 is not among them: see [Note: a stream carries its norm]."""
MANY = 33
"""Rows from which a kernel's programs keep those of the next one out; with fewer, both have room."""


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
    changed = any(forward_hooks(module)) or "forward" in vars(module) or compiled_call(module) is not None
    if type(module) not in _KNOWN or changed:
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

    def __init__(self, model: nn.Module, slots: int, *, ahead: int | None = None, early: bool = EARLY) -> None:
        """`model`: one that `takes_model` takes; `slots`: places of the cache.

        `ahead` are the bytes of [Note: prefetching for the next kernel], 0 for none; absent: `AHEAD` for `MANY` rows.
        `early` is for [Note: early loads].
        """
        self._model = cast(Llama, model)
        self._ahead, self._early = ahead, early
        config, device = self._model.config, self._model.embedding.weight.device
        self._counters = make_counters(device)
        table = rotary_table(torch.arange(slots, device=device)[None], config.dim // config.heads, config.rope_base)
        self._cos, self._sin = (each[0, 0] for each in table)

    def __call__(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits (rows, vocabulary) behind one token for each row, at its next place.

        A layer's cache is its keys and its values, and has those of the new tokens afterwards.
        """
        stream = self._through(tokens, at, caches)
        return project(stream, [self._head()], self._counters, early=self._early)

    def likeliest(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The likeliest token behind one token for each row, and its log-probability; otherwise like a call."""
        stream = self._through(tokens, at, caches)
        return likeliest(stream, self._head(), self._counters)

    def draw(
        self,
        tokens: Tensor,
        at: At,
        caches: Iterable[tuple[Tensor, Tensor]],
        temperature: float,
        chance: CounterRNG,
    ) -> tuple[Tensor, Tensor]:
        """A token drawn from all behind one token for each row, and its log-probability; otherwise like a call."""
        stream = self._through(tokens, at, caches)
        return drawn(stream, self._head(), temperature, chance, self._counters)

    def _through(self, tokens: Tensor, at: At, caches: Iterable[tuple[Tensor, Tensor]]) -> ResidualStream:
        model, counters, early = self._model, self._counters, self._early
        blocks: list[Any] = list(model.blocks)
        norms = [_norm(norm) for block in blocks for norm in (block.attention_norm, block.ffn_norm)]
        norms.append(_norm(model.norm))
        mixers = [[each.weight for each in (b.attention.q, b.attention.k, b.attention.v)] for b in blocks]

        usual = AHEAD if len(tokens) >= MANY else 0
        budget = usual if self._ahead is None else self._ahead

        def next_is(form: str, *weights: Tensor) -> Ahead | None:
            return ahead_of(form, len(tokens), weights, budget=budget) if budget else None

        stream = look_up(tokens, model.embedding.weight, norms[0], at=at, ahead=next_is("project", *mixers[0]))
        for layer, (block, (keys, values)) in enumerate(zip(blocks, caches, strict=True)):
            out, gate, up, down = (
                p.weight for p in (block.attention.out, block.ffn.gate, block.ffn.up, block.ffn.down)
            )
            seen = (each.flatten(2).flatten(0, 1) for each in (keys, values))
            later = ("project", *mixers[layer + 1]) if layer + 1 < len(blocks) else ("wide", self._head())
            mixed = project(stream, mixers[layer], counters, ahead=next_is("cache", *seen), early=early)
            y = attend_cached(
                mixed,
                self._cos,
                self._sin,
                keys,
                values,
                at.places,
                counters,
                ahead=next_is("add", out),
                early=early,
            )
            stream = add(stream, y, out, norms[2 * layer + 1], counters, ahead=next_is("gated", gate, up), early=early)
            y = gated(stream, gate, up, ahead=next_is("add", down), early=early)
            stream = add(stream, y, down, norms[2 * layer + 2], counters, ahead=next_is(*later), early=early)
        return stream

    def _head(self) -> Tensor:
        own: Tensor | None = self._model.head.weight
        return self._model.embedding.weight if own is None else own


def _norm(module: Any) -> Norm:
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(module.weight, eps)


SLOTS = 64
"""The cache is a multiple of so many tokens long: kernels that take a mask want its rows aligned."""
READ_AT_ONCE = 8192
"""Tokens of prompts that keep a device busy for longer than its host takes to ask for them; more at once would only
need more memory, and more filling."""


class Cache:
    """Where the rows end, and what attention may see; shared by all layers."""

    def __init__(self, lengths: Tensor, ends: Tensor, dtype: torch.dtype) -> None:
        self.slots = -(-int(ends.max()) // SLOTS) * SLOTS
        self.at = At(lengths, ends - 1, torch.empty_like(lengths))
        self.numbers = torch.arange(len(lengths), device=lengths.device)
        self.reading: slice | None = None
        """Rows whose prompts are being read; else, each row gets one token."""
        places = torch.arange(self.slots, device=lengths.device)
        self.mask = torch.zeros(len(lengths), self.slots, device=lengths.device, dtype=dtype)
        self.mask.masked_fill_(places >= lengths[:, None], float("-inf"))

    def open(self) -> None:
        """Let each row see its next token."""
        self.at.advance()
        self.mask.scatter_(1, self.at.places[:, None], 0.0)

    def keep(self, rows: Tensor) -> None:
        """Forget the others."""
        self.at, self.mask = At(*(each[rows] for each in self.at)), self.mask[rows]
        self.numbers = self.numbers[: len(rows)]

    def extend(self, other: Cache) -> None:
        """Take the rows of another cache behind these; both get as many slots as the longer one has."""
        self.slots = max(self.slots, other.slots)
        self.at = At(*(torch.cat(pair) for pair in zip(self.at, other.at, strict=True)))
        masks = (F.pad(each, (0, self.slots - each.shape[1]), value=float("-inf")) for each in (self.mask, other.mask))
        self.mask = torch.cat(list(masks))
        self.numbers = torch.arange(len(self.mask), device=self.mask.device)


class Remembering:
    """Attention of one layer over all that its rows have seen."""

    def __init__(self, attend: Any, cache: Cache) -> None:
        self._attend = attend
        self.cache = cache
        self.keys = self.values = torch.empty(0)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float = 0.0
    ) -> Tensor:
        """Attention over (batch, heads, tokens, head_dim), as `attend`."""
        cache = self.cache
        if cache.reading is not None:
            if not self.keys.numel():
                room = (len(cache.numbers), k.shape[1], cache.slots, k.shape[3])
                self.keys, self.values = k.new_zeros(room), v.new_zeros(room)
            for kept, read in ((self.keys, k), (self.values, v)):
                kept[cache.reading, :, : k.shape[2]] = read
            answer: Tensor = self._attend(q, k, v, mask, dropout)
            return answer
        self.keys[cache.numbers, :, cache.at.places] = k[:, :, 0]
        self.values[cache.numbers, :, cache.at.places] = v[:, :, 0]
        # The queries of a group stand in for tokens of one head: no key or value is repeated for them.
        batch, heads, _, width = q.shape
        grouped = q.reshape(batch, k.shape[1], -1, width)
        allowed = cache.mask.to(q.dtype)[:, None, None].expand(-1, k.shape[1], grouped.shape[2], -1)
        y = F.scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=allowed)
        return y.reshape(batch, heads, 1, width)

    def keep(self, rows: Tensor) -> None:
        """Forget the others."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def _stacked(first: Tensor, second: Tensor, slots: int) -> Tensor:
    """Rows (rows, heads, slots, features) of two caches as one, with so many slots."""
    rows = first.new_zeros(len(first) + len(second), first.shape[1], slots, first.shape[3])
    rows[: len(first), :, : first.shape[2]] = first
    rows[len(first) :, :, : second.shape[2]] = second
    return rows


def parts_of(prompts: Sequence[Sequence[int]]) -> list[slice]:
    """Neighbours that are read together: as many as make up `READ_AT_ONCE` tokens, filling included.

    Generation puts prompts of about one length side by side, so the parts need less filling than the whole.
    """
    parts, begin, longest = [], 0, 0
    for number, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if begin < number and longest * (number + 1 - begin) > READ_AT_ONCE:
            parts.append(slice(begin, number))
            begin, longest = number, len(prompt)
    return [*parts, slice(begin, len(prompts))]


class CachedDecoder(GrowingDecoder):
    """For models whose attention is Plait's own; see [Note: rows are padded behind]."""

    def __init__(self, model: nn.Module, device: torch.device, *, call: Call | None = None) -> None:
        """`call` is what calls the model, where that is not the model itself."""
        self._model = model
        self._call = model if call is None else call
        self._alone = call is None
        self._device = device
        self._attentions = [module for module in model.modules() if isinstance(module, Attention)]
        self._usual: list[Any] = []
        self._layers: list[Remembering] = []
        self._cache: Cache | None = None
        self._quick: QuickStep | None = None
        self._last: Tensor | None = None
        self._warm: set[Hashable] = set()
        self._hook: Any = None
        self._head: Any = model.head
        # A mixture may look at sizes that are data, and what calls a sharded model gathers weights: neither can be
        # recorded.
        mixed = any(type(part).__name__ == "Experts" for part in model.modules())
        self.capturable = device.type == "cuda" and call is None and not mixed

    def begin(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> Tensor:
        """Read the prompts; of the last token of each, the logits."""
        self.close()
        self._cache = self._cache_for(prompts, rooms)
        if self._alone and takes_model(self._model):
            self._quick = QuickStep(self._model, self._cache.slots)
        self._usual = [attention.attend for attention in self._attentions]
        self._layers = [Remembering(attend, self._cache) for attend in self._usual]
        for attention, layer in zip(self._attentions, self._layers, strict=True):
            attention.attend = layer
        # Logits of every place would be the largest tensor by far, and one of each row is wanted.
        self._hook = self._head.register_forward_pre_hook(self._only_last)
        return self._read(self._cache, prompts)

    def add(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> Tensor:
        """Read further prompts into a cache of their own, and put it behind the one of the batch."""
        cache, kept = self._begun(), self._caches()
        fresh = self._cache_for(prompts, rooms)
        for layer in self._layers:
            layer.cache, layer.keys, layer.values = fresh, torch.empty(0), torch.empty(0)
        try:
            logits = self._read(fresh, prompts)
            slots = max(cache.slots, fresh.slots)
            for number, layer in enumerate(self._layers):  # one layer at a time: both copies need memory
                keys, values = kept[number]
                kept[number] = (_stacked(keys, layer.keys, slots), _stacked(values, layer.values, slots))
                layer.keys = layer.values = torch.empty(0)
            cache.extend(fresh)
        finally:
            for layer, (keys, values) in zip(self._layers, kept, strict=True):
                layer.cache, layer.keys, layer.values = cache, keys, values
        if self._quick is not None:
            self._quick = QuickStep(self._model, cache.slots)
        return logits

    def _cache_for(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> Cache:
        lengths = lengths_of(prompts, self._device)
        dtype = next(self._attentions[0].parameters()).dtype  # a matrix in few bits is no parameter
        return Cache(lengths, lengths + torch.tensor(rooms, device=self._device), dtype)

    def _read(self, cache: Cache, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fill a cache that every layer has; of the last token of each prompt, the logits."""
        logits: list[Tensor] = []
        try:
            with fused(self._model) if self._quick is not None else nullcontext():
                # Ranks that share a model must all call it as often.
                for part in parts_of(prompts) if self._alone else [slice(0, len(prompts))]:
                    cache.reading, self._last = part, cache.at.lengths[part] - 1
                    logits.append(self._call(input_ids=padded(prompts[part], self._device))[:, 0])
        finally:
            cache.reading = self._last = None
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        """One token to each row, at its own end."""
        cache = self._begun()
        if self._quick is not None:
            return self._quick(tokens, cache.at, self._caches())
        cache.open()
        logits: Tensor = self._call(input_ids=tokens[:, None], positions=cache.at.places[:, None])
        return logits[:, 0]

    def likeliest(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One token to each row, at its own end; where the short way is known, no logits are written."""
        if self._quick is None:
            return super().likeliest(tokens)
        return self._quick.likeliest(tokens, self._begun().at, self._caches())

    def draw(self, tokens: Tensor, temperature: float, chance: CounterRNG) -> tuple[Tensor, Tensor]:
        """One token to each row, at its own end; where the short way is known, logits are passed over once."""
        if self._quick is None:
            return super().draw(tokens, temperature, chance)
        return self._quick.draw(tokens, self._begun().at, self._caches(), temperature, chance)

    def is_warm(self, way: Hashable) -> bool:
        """Whether steps of this size and way were taken before."""
        cache = self._begun()
        kind = (len(cache.numbers), cache.slots, way)
        known = kind in self._warm
        self._warm.add(kind)
        return known

    def _begun(self) -> Cache:
        assert self._cache is not None, "begin comes first"
        return self._cache

    def _caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(layer.keys, layer.values) for layer in self._layers]

    def keep(self, rows: Tensor) -> None:
        """Forget the others."""
        self._begun().keep(rows)
        for layer in self._layers:
            layer.keep(rows)

    def close(self) -> None:
        """Give every layer its usual attention back."""
        for attention, usual in zip(self._attentions, self._usual, strict=False):
            attention.attend = usual
        if self._hook is not None:
            self._hook.remove()
        self._usual, self._layers, self._cache, self._hook, self._quick = [], [], None, None, None

    def _only_last(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._last is None:
            return None
        hidden: Tensor = args[0]
        last = self._last[:, None, None].expand(-1, 1, hidden.shape[-1])
        return (hidden.gather(1, last), *args[1:])
