"""Sampling settings and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.errors import GenerateError


class Completion(NamedTuple):
    """The answer to one prompt."""

    tokens: list[int]
    """The generated tokens, including the stop token if one was generated."""
    logprobs: list[float]
    """The model's log-probability of each token: temperature 1, without top-k, top-p or penalty."""
    finish_reason: Literal["stop", "length"]
    """`stop`: there was a stop token or text. `length`: the maximum of tokens was reached."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and what ends an answer."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0: always choose the most likely token."""
    top_k: int | None = None
    """Sample from this number of most likely tokens; None: from all."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities add up to this; None: from all."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of the prompt and the answer become less likely."""
    stop: tuple[int | str, ...] = ()
    """Tokens and texts that end an answer."""
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "max_new_tokens": self.max_new_tokens < 1 and "at least 1",
            "temperature": not 0.0 <= self.temperature < float("inf") and "0 or more",
            "top_k": self.top_k is not None and self.top_k < 1 and "at least 1, or nothing",
            "top_p": self.top_p is not None and not 0.0 < self.top_p <= 1.0 and "above 0 and at most 1, or nothing",
            "repetition_penalty": not 0.0 < self.repetition_penalty < float("inf") and "above 0; 1 changes nothing",
            "stop": "" in self.stop and "texts with something in them",
        }
        for name, remedy in wrong.items():
            if remedy:
                raise GenerateError(f"{name}={getattr(self, name)!r} is not allowed; it must be {remedy}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen, without a penalty."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0

    @property
    def draws_from_all(self) -> bool:
        """Whether tokens are sampled from the whole vocabulary, without a penalty."""
        unrestricted = self.top_k is None and self.top_p in (None, 1.0)
        return self.temperature > 0.0 and unrestricted and self.repetition_penalty == 1.0

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens in `stop`."""
        return tuple(stop for stop in self.stop if isinstance(stop, int))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))


def check_prompts(prompts: Sequence[Sequence[int]], *, vocabulary: int | None, context: int | None) -> None:
    """Raise a `GenerateError` for the first prompt that is empty, too long, or has tokens outside the vocabulary."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise GenerateError(f"prompt {index} is empty: it needs at least one token")
        if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            strange = next(token for token in prompt if not 0 <= token < vocabulary)
            raise GenerateError(
                f"prompt {index} has the token {strange}, and the vocabulary is 0 to {vocabulary - 1}: encode it with "
                "the tokenizer that the model was trained with"
            )
        if context is not None and len(prompt) >= context:
            raise GenerateError(
                f"prompt {index} has {len(prompt)} tokens, and the context is {context}: shorten it by at least "
                f"{len(prompt) - context + 1}"
            )
