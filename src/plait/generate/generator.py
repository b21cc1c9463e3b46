"""Generation with a model: many prompts at once, or one as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from plait.errors import GenerateError
from plait.generate.batch import CHECK_EVERY, AnyRank, ContinuousBatch, Decode, GenerationRow, generate_batch
from plait.generate.cached import CachedDecoder
from plait.generate.decoder import Call, Decoder, PlainDecoder, TransformersDecoder, accepts
from plait.generate.options import Completion, Sampling, check_prompts
from plait.models import Attention

CONTEXT_KEYS = ("seq_len", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""The keys of the context length in models' configurations."""


class Generator:
    """Generates with a model, which is in evaluation mode while it generates and restored to its mode afterwards."""

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: Decode | None = None,
        context: int | None = None,
        max_rows: int | None = None,
        cache: bool = True,
        graphs: bool = True,
        call: Call | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        any_rank: AnyRank | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Choose a decoder for the model.

        `decode` converts tokens to text, to find stop texts. `context` is the context length; by default that of the
        model's configuration. `max_rows` is the number of prompts per batch. `cache` and `graphs` allow a KV cache and
        CUDA graphs, where the model supports them. Generation runs inside the context that `around` returns. For a
        model that several ranks share, `call` is used instead of calling the model directly, and `any_rank` is a
        collective that returns whether any rank has unfinished rows.
        """
        self.model = model
        self.context = context_of(model) if context is None else context
        self._decode = decode
        self._max_rows = max_rows
        self._graphs = graphs
        self._around = around
        self._any_rank = any_rank
        self._device = next(model.parameters()).device if device is None else device
        self._decoder = make_decoder(model, self._device, call=call, cache=cache)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generate an answer to each prompt, and return them in the order of the prompts.

        The seed and a prompt's key determine its random numbers; by default the key is the prompt's index.
        """
        keys = range(len(prompts)) if keys is None else keys
        if len(keys) != len(prompts):
            raise GenerateError(f"{len(keys)} keys for {len(prompts)} prompts: give one key per prompt, or none")
        self._check(prompts, sampling)
        # Prompts of similar length are in one batch, so that little padding is needed.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        width = self._max_rows or max(len(prompts), 1)
        completions: dict[int, Completion] = {}
        with self._ready():
            for first in range(0, len(order), width):
                chosen = order[first : first + width]
                batch_prompts, batch_keys = [prompts[i] for i in chosen], [keys[i] for i in chosen]
                answers = self._run(batch_prompts, batch_keys, sampling, CHECK_EVERY)
                completions.update(zip(chosen, _last_of(answers), strict=True))
        return [completions[index] for index in range(len(prompts))]

    def stream(self, prompt: Sequence[int], sampling: Sampling, *, key: int = 0) -> Iterator[Completion]:
        """Yield the answer to one prompt after each token; the last value equals the result of `generate`."""
        self._check([prompt], sampling)
        answers = self._run([prompt], [key], sampling, 1)
        try:
            while True:
                with self._ready():  # only during a step: between two steps the caller may use the model
                    live = next(answers, None)
                if live is None:
                    return
                yield live.completions()[0]
        finally:
            answers.close()

    @contextmanager
    def continuous(self) -> Iterator[ContinuousBatch]:
        """Return a context whose value is an empty `ContinuousBatch`. Inside it, nothing else may use the model."""
        with self._ready():
            batch = ContinuousBatch(self._decoder, self._device, graphs=self._graphs)
            try:
                yield batch
            finally:
                batch.close()

    def row(self, prompt: Sequence[int], sampling: Sampling, *, key: int = 0, top: int = 0) -> GenerationRow:
        """Return a prompt as a row for `continuous`; raise a `GenerateError` if the prompt is invalid."""
        self._check([prompt], sampling)
        return GenerationRow(prompt, sampling, self._max_new_tokens([prompt], sampling)[0], key, top)

    def _max_new_tokens(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        """Return the maximum of new tokens of each prompt, within the context length."""
        most = sampling.max_new_tokens
        return [most if self.context is None else min(most, self.context - len(prompt)) for prompt in prompts]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int],
        sampling: Sampling,
        check_every: int,
    ) -> Any:
        limits = self._max_new_tokens(prompts, sampling)
        return generate_batch(
            self._decoder,
            prompts,
            keys,
            limits,
            sampling,
            self._device,
            decode=self._decode,
            any_rank=self._any_rank,
            graphs=self._graphs,
            check_every=check_every,
        )

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        if sampling.stop_texts and self._decode is None:
            raise GenerateError(f"stop={sampling.stop_texts[0]!r} is a text, which needs `decode`; pass a tokenizer's")
        check_prompts(prompts, vocabulary=vocabulary_of(self.model), context=self.context)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with self._around():
                yield
        finally:
            self.model.train(training)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: Sequence[int | str] = (),
    seed: int = 0,
    keys: Sequence[int] | None = None,
    **options: Any,
) -> list[Completion]:
    """Generate and return an answer to each prompt; see `Sampling` for the settings, and `Generator` for `options`."""
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, repetition_penalty, tuple(stop), seed)
    return Generator(model, **options).generate(prompts, sampling, keys=keys)


def make_decoder(model: nn.Module, device: torch.device, *, call: Call | None = None, cache: bool = True) -> Decoder:
    """Return the fastest decoder that supports the model."""
    if cache and getattr(model, "head", None) is not None and any(isinstance(m, Attention) for m in model.modules()):
        return CachedDecoder(model, device, call=call)
    if cache and is_of_transformers(model) and accepts(model, "past_key_values"):
        return TransformersDecoder(model, device, call=call)
    return PlainDecoder(model if call is None else call, device)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is from `transformers`, also if its class was replaced by a subclass."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def context_of(model: nn.Module) -> int | None:
    """Return the context length in a model's configuration; None if it has none."""
    configs = [getattr(model, "config", None)]
    configs.append(getattr(configs[0], "text_config", None))  # of a multimodal model
    lengths = (getattr(config, name, None) for config in configs for name in CONTEXT_KEYS)
    return next((int(length) for length in lengths if length), None)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary size in a model's configuration; None if it has none."""
    config: Any = getattr(model, "config", None)
    size = getattr(config, "vocab_size", getattr(getattr(config, "text_config", None), "vocab_size", None))
    return None if size is None else int(size)


def _last_of(answers: Any) -> list[Completion]:
    while True:
        try:
            next(answers)
        except StopIteration as over:
            completions: list[Completion] = over.value
            return completions
