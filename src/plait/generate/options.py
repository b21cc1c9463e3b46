"""What is asked of a model that writes, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from plait.errors import GenerateError


class Completion(NamedTuple):
    """What followed one prompt."""

    tokens: list[int]
    """New tokens; the one that ended them is the last, where one did."""
    logprobs: list[float]
    """Of each token, as the model itself has it: temperature 1, nothing cut off, nothing penalised."""
    finish_reason: Literal["stop", "length"]
    """`stop`: a stop token or text came. `length`: there was no room for more."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen, and when a text is over."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 takes the likeliest token each time."""
    top_k: int | None = None
    """Choose among so many likeliest tokens."""
    top_p: float | None = None
    """Choose among the likeliest tokens that together have this probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that came before become less likely."""
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
                raise GenerateError(f"{name}={getattr(self, name)!r} cannot be; it is {remedy}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken as the model has it."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0

    @property
    def draws_from_all(self) -> bool:
        """Whether a token is drawn from all, as likely as the model has each at the temperature."""
        whole = self.top_k is None and self.top_p in (None, 1.0)
        return self.temperature > 0.0 and whole and self.repetition_penalty == 1.0

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Those of `stop` that are tokens."""
        return tuple(stop for stop in self.stop if isinstance(stop, int))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Those of `stop` that are texts."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))


def check_prompts(prompts: Sequence[Sequence[int]], *, vocabulary: int | None, context: int | None) -> None:
    """Refuse prompts that no answer can follow, before anything is computed."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise GenerateError(f"prompt {index} is empty: a model needs at least one token to go on from")
        if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            strange = next(token for token in prompt if not 0 <= token < vocabulary)
            raise GenerateError(
                f"prompt {index} has the token {strange}, and the model knows 0 to {vocabulary - 1}: "
                "encode it with the tokenizer that the model was trained with"
            )
        if context is not None and len(prompt) >= context:
            raise GenerateError(
                f"prompt {index} has {len(prompt)} tokens, and the model sees {context}: shorten it, so that at least "
                "one new token has room"
            )
