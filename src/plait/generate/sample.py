"""A minimal sampling loop, without a cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: Tensor,
    *,
    new_tokens: int,
    window: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end: int | None = None,
) -> Tensor:
    """Return `prompt` (one row of token ids) with at most `new_tokens` new tokens appended.

    The model sees the last `window` tokens. `temperature` 0 always chooses the most likely token. Generation stops
    after the token `end`.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    training = model.training
    model.eval()
    tokens = prompt
    try:
        for _ in range(new_tokens):
            logits = model(tokens[-window:].unsqueeze(0))[0, -1].float()
            token = _pick(logits, temperature, top_k, generator)
            tokens = torch.cat((tokens, token))
            if end is not None and int(token) == end:
                break
    finally:
        model.train(training)
    return tokens


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0.0:
        return logits.argmax(keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.numel():
        floor = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)
