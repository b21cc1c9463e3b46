"""Models of `transformers` with a cache of their own kind.

Their caches have one end for all rows, so prompts are padded in front here: whatever a model does with distances, a
sliding window included, distances are right. Positions and a mask tell each row where it begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.generate.decoder import Call, Decoder, lengths_of, padded


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the forward of a `transformers` model has this parameter."""
    known: Any = getattr(model, "accepts", None)
    return name in (known if known is not None else inspect.signature(type(model).forward).parameters)


class TransformersDecoder(Decoder):
    """Goes on by `past_key_values`."""

    def __init__(self, model: nn.Module, device: torch.device, *, call: Call | None = None) -> None:
        """`call` is what calls the model, where that is not the model itself."""
        self._call = model if call is None else call
        self._device = device
        self._positioned = accepts(model, "position_ids")
        self.mixes_lengths = self._positioned  # else nothing says that a padded row begins later
        self._last_only = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self._past: Any = None
        self._mask = self._lengths = self._last = torch.empty(0)

    def begin(self, prompts: Sequence[Sequence[int]], rooms: Sequence[int]) -> Tensor:
        """Read the prompts."""
        rows, self._lengths = padded(prompts, self._device, left=True), lengths_of(prompts, self._device)
        width = rows.shape[1]
        places = torch.arange(width, device=self._device)
        mask = places >= width - self._lengths[:, None]
        self._mask, self._last = mask.long(), self._lengths + torch.tensor(rooms, device=self._device) - 1
        return self._ask(rows, (mask.cumsum(1) - 1).clamp(min=0), past=None)

    def step(self, tokens: Tensor) -> Tensor:
        """One token to each row."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        positions = torch.minimum(self._lengths, self._last)[:, None]
        self._lengths = self._lengths + 1
        return self._ask(tokens[:, None], positions, past=self._past)

    def keep(self, rows: Tensor) -> None:
        """Forget the others."""
        self._mask, self._lengths, self._last = self._mask[rows], self._lengths[rows], self._last[rows]
        self._past.batch_select_indices(rows)

    def close(self) -> None:
        """Let go of the cache."""
        self._past = None

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
        self._past = output.past_key_values
        logits: Tensor = output.logits[:, -1]
        return logits
