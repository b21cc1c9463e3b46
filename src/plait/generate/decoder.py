"""Decoders compute the logits of the next token for a batch of rows, a row being a prompt and its answer so far.

The interface; a decoder without a cache; and one for models of `transformers`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.distributed import is_sharded
from plait.kernels.decode import CounterRNG, greedy, sample_tokens

Call = Callable[..., Any]
"""A model, or a function that calls it with the same arguments."""


class Decoder(ABC):
    """Prefills the prompts of a batch, and appends tokens to its rows. It has one batch at a time; `close` frees it."""

    capturable = False
    """Whether `step` may be captured in a CUDA graph."""
    mixes_lengths = True
    """Whether prompts of unequal length may share a batch."""

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Prefill the prompts, and reserve space for new tokens; return the logits of each row's next token."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, and return the logits of each row's next token.

        A row whose reserved space is full does not grow; its logits are undefined then.
        """

    def step_greedy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Do `step`, but return the most likely next tokens and their log-probabilities in fp32."""
        return greedy(self.step(tokens))

    def step_sample(self, tokens: Tensor, temperature: float, rng: CounterRNG) -> tuple[Tensor, Tensor]:
        """Do `step`, but sample the next tokens from the whole vocabulary; return them and their log-probabilities.

        `temperature` is above 0. The log-probabilities, in fp32, are those of temperature 1.
        """
        return sample_tokens(self.step(tokens), temperature, rng)

    def is_warm(self, way: Hashable) -> bool:
        """Whether steps of the current batch size with the sampling settings `way` were done before.

        Then no kernel has to be compiled or set up, and a step may be captured at once. A call records the step as
        done, so call this right before it.
        """
        return False

    @abstractmethod
    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""

    def close(self) -> None:  # noqa: B027  # most hold nothing but tensors
        """Free the batch, and restore the model."""


class GrowingDecoder(Decoder):
    """A decoder whose batch further rows can join (continuous batching)."""

    @abstractmethod
    def add(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Prefill further prompts as new rows; return the logits of each new row's next token."""


def pad_rows(
    prompts: Sequence[Sequence[int]], device: torch.device, *, width: int | None = None, left: bool = False
) -> Tensor:
    """Return rows of unequal length as one tensor, padded with zeros at the end or, with `left`, at the beginning."""
    width = max(len(prompt) for prompt in prompts) if width is None else width
    rows = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        start = width - len(prompt) if left else 0
        row[start : start + len(prompt)] = torch.tensor(prompt)
    return rows.to(device)


def pad_to_multiple(rows: Tensor, cuts: int) -> Tensor:
    """Return rows, right-padded with zeros to a multiple of `cuts` tokens."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % cuts))


def lengths_of(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the length of each prompt, as a tensor."""
    return torch.tensor([len(prompt) for prompt in prompts], device=device)


class PlainDecoder(GrowingDecoder):
    """Calls the model on the whole rows for every token, without a cache. The reference for other decoders."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        self._rows = self._lengths = self._row_ends = torch.empty(0)
        self._longest = 0

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Store the prompts right-padded, so that new tokens do not change positions; return the logits of the next."""
        self._lengths = lengths_of(prompts, self._device)
        self._row_ends = self._lengths + torch.tensor(max_new_tokens, device=self._device)
        self._rows = pad_rows(prompts, self._device, width=int(self._row_ends.max()))
        self._longest = max(len(prompt) for prompt in prompts)
        return self._logits()

    def add(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Append rows, all padded to the width of the widest; return the logits of the new rows' next tokens."""
        before = (self._rows, self._lengths, self._row_ends)
        longest = self._longest
        logits = self.begin(prompts, max_new_tokens)
        width = max(before[0].shape[1], self._rows.shape[1])
        rows = [torch.nn.functional.pad(rows, (0, width - rows.shape[1])) for rows in (before[0], self._rows)]
        self._rows = torch.cat(rows)
        self._lengths = torch.cat([before[1], self._lengths])
        self._row_ends = torch.cat([before[2], self._row_ends])
        self._longest = max(longest, self._longest)
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, and return the logits of the next."""
        self._lengths = torch.minimum(self._lengths + 1, self._row_ends)
        self._rows.scatter_(1, self._lengths[:, None] - 1, tokens[:, None])
        self._longest = min(self._longest + 1, self._rows.shape[1])
        return self._logits()

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""
        self._rows, self._lengths, self._row_ends = self._rows[rows], self._lengths[rows], self._row_ends[rows]

    def _logits(self) -> Tensor:
        logits: Tensor = self._call(self._rows[:, : self._longest])
        if is_sharded(logits):
            logits = logits.full_tensor()
        last = (self._lengths - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
        return logits.gather(1, last).squeeze(1)


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the `forward` of a `transformers` model has an argument of this name."""
    known: Any = getattr(model, "accepts", None)
    return name in (known if known is not None else inspect.signature(type(model).forward).parameters)


class TransformersDecoder(Decoder):
    """Models of `transformers` with their own cache (`past_key_values`).

    In such a cache all rows end at the same slot, so prompts are left-padded. Then the distances between a row's tokens
    in the cache are the true ones, which a sliding window, for example, relies on. `position_ids` and a mask tell the
    model where each row begins.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, call: Call | None = None) -> None:
        """`call` is used instead of calling the model directly, if given."""
        self._call = model if call is None else call
        self._device = device
        self._positioned = accepts(model, "position_ids")
        self.mixes_lengths = self._positioned  # without position_ids a left-padded row would get wrong positions
        self._last_only = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self._cache: Any = None
        self._uncached: PlainDecoder | None = None
        """Set for models that take a cache but return none."""
        self._mask = self._lengths = self._last = torch.empty(0)

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        """Prefill the prompts, and return the logits of each row's next token."""
        if self._uncached is None:
            logits = self._prefill(prompts, max_new_tokens)
            if self._cache is not None:
                return logits
            self._uncached = PlainDecoder(self._call, self._device)
        return self._uncached.begin(prompts, max_new_tokens)

    def _prefill(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> Tensor:
        rows, self._lengths = pad_rows(prompts, self._device, left=True), lengths_of(prompts, self._device)
        width = rows.shape[1]
        slots = torch.arange(width, device=self._device)
        mask = slots >= width - self._lengths[:, None]
        self._mask, self._last = mask.long(), self._lengths + torch.tensor(max_new_tokens, device=self._device) - 1
        return self._ask(rows, (mask.cumsum(1) - 1).clamp(min=0), past=None)

    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each row, and return the logits of the next."""
        if self._uncached is not None:
            return self._uncached.step(tokens)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        positions = torch.minimum(self._lengths, self._last)[:, None]
        self._lengths = self._lengths + 1
        return self._ask(tokens[:, None], positions, past=self._cache)

    def keep(self, rows: Tensor) -> None:
        """Remove all rows but these."""
        if self._uncached is not None:
            self._uncached.keep(rows)
            return
        self._mask, self._lengths, self._last = self._mask[rows], self._lengths[rows], self._last[rows]
        self._cache.batch_select_indices(rows)

    def close(self) -> None:
        """Free the cache."""
        self._cache = None

    def _ask(self, rows: Tensor, positions: Tensor, past: Any) -> Tensor:
        extra: dict[str, Any] = {"position_ids": positions} if self._positioned else {}
        output = self._call(
            input_ids=rows,
            attention_mask=self._mask,
            past_key_values=past,
            use_cache=True,
            return_dict=True,
            **extra,
            **self._last_only,
        )
        self._cache = getattr(output, "past_key_values", None)
        logits: Tensor = output.logits[:, -1]
        return logits
