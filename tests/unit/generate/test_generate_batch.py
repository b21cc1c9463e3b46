"""Many prompts at once give what each gives alone, and what no cache would give."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from tests.hf_models import tiny_config
from tests.refusals import refused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.config.model import HFConfig
from plait.errors import GenerateError
from plait.generate import Completion, Generator, Sampling, generate
from plait.generate.batch import Answers, choose
from plait.generate.cached import CachedDecoder
from plait.generate.perplexity import measure_perplexity
from plait.kernels.decode.sampling import COUNTER_RNG_BITS, CounterRNG
from plait.models import build_model, preset

VOCABULARY = 256
HF: dict[str, dict[str, Any]] = {
    "transformers llama": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
    },
    "transformers sliding window": {
        "model_type": "mistral",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "sliding_window": 6,
        "max_position_embeddings": 64,
    },
}
KINDS = ["gpt", "llama", "moe", *HF]


@pytest.fixture(autouse=True)
def _fixed_inputs() -> None:
    """Rounding differs between batches: among fresh inputs a draw would now and then fall into the difference."""
    random.seed(5)
    torch.manual_seed(5)


def make(kind: str) -> nn.Module:
    own = kind in ("gpt", "llama", "moe")
    config = preset(kind, "tiny") if own else HFConfig(config={**HF[kind], "vocab_size": VOCABULARY})
    model = build_model(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3.0)  # far from even, so that a wrong position shows
    return model


def some_prompts(count: int) -> list[list[int]]:
    return [[random.randrange(VOCABULARY) for _ in range(random.randint(1, 20))] for _ in range(count)]


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    assert [each.finish_reason for each in ours] == [each.finish_reason for each in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_writes_what_each_prompt_gets_alone_and_what_no_cache_would_give(kind: str) -> None:
    model, prompts = make(kind), some_prompts(4)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "stop": range(0, 256, 20)},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3, "stop": range(0, 256, 20)},
    ]
    for way in ways:
        options = {**way, "max_new_tokens": 24, "seed": random.randrange(1000)}
        batch = generate(model, prompts, **options)
        same(batch, generate(model, prompts, cache=False, **options))
        same(batch, [generate(model, [p], keys=[i], **options)[0] for i, p in enumerate(prompts)])
    assert model.training, "the mode is as before"


def test_log_probabilities_are_those_of_the_forward_pass_whatever_was_cut_off() -> None:
    model, prompts = make("llama"), some_prompts(3)
    found = generate(model, prompts, max_new_tokens=12, temperature=0.5, top_k=5, repetition_penalty=2.0)
    for prompt, completion in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=2e-5)


def test_rows_that_are_done_leave_and_the_others_do_not_notice() -> None:
    model, prompts = make("llama"), some_prompts(8)
    free = generate(model, prompts, max_new_tokens=44, temperature=1.0, seed=1, max_rows=3)
    stop = [token for token, _ in Counter(t for each in free[:7] for t in each.tokens[:9]).most_common(40)]
    ended = generate(model, prompts, max_new_tokens=44, temperature=1.0, seed=1, stop=stop)
    for whole, cut in zip(free, ended, strict=True):
        place = next((i for i, token in enumerate(whole.tokens) if token in stop), None)
        expected = whole.tokens if place is None else whole.tokens[: place + 1]
        assert cut.tokens == expected
        assert cut.finish_reason == ("length" if place is None else "stop")


def test_a_row_ends_where_the_model_sees_no_further() -> None:
    model = make("gpt")  # sees 64 tokens
    short, long = generate(model, [[1] * 4, [2] * 60], max_new_tokens=30, stop=())
    assert (len(short.tokens), len(long.tokens), long.finish_reason) == (30, 4, "length")


def test_stop_texts_end_a_row_at_the_token_that_completes_them() -> None:
    model = make("llama")

    def decode(tokens: Any) -> str:
        return "".join(f"{token:02x}" for token in tokens)

    prompts = some_prompts(3)
    free = generate(model, prompts, max_new_tokens=40, seed=2)
    text = decode(free[0].tokens)[41:46]  # from the middle of one token to the middle of another
    found = generate(model, prompts, max_new_tokens=40, seed=2, stop=[text], decode=decode)
    for whole, cut in zip(free, found, strict=True):
        place = decode(whole.tokens).find(text)
        expected = whole.tokens if place < 0 else whole.tokens[: -(-(place + len(text)) // 2)]
        assert cut.tokens == expected
    assert found[0].finish_reason == "stop"


def test_a_stream_grows_to_what_generate_gives_and_may_be_left_in_the_middle() -> None:
    model = make("llama")
    usual = [block.attention.attend for block in model.blocks]  # type: ignore[union-attr]
    generator, sampling = Generator(model), Sampling(max_new_tokens=9, seed=5)
    (prompt,) = some_prompts(1)
    pieces = list(generator.stream(prompt, sampling))
    assert [len(piece.tokens) for piece in pieces] == list(range(1, 10))
    assert [pieces[-1]] == generator.generate([prompt], sampling)
    left = generator.stream(prompt, sampling)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert [block.attention.attend for block in model.blocks] == usual  # type: ignore[union-attr]


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose answer is a number in Python, or a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_step_can_be_recorded_for_it_waits_for_nothing_and_changes_the_same_tensors(kind: str) -> None:
    model, prompts = make(kind).eval(), some_prompts(3)
    for way in (
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 9, "repetition_penalty": 1.2},
        {"top_p": 0.7, "stop": (1, 2)},
    ):
        decoder = CachedDecoder(model, torch.device("cpu"))
        answers = Answers(prompts, [0, 1, 2], [9, 9, 9], Sampling(9, **way), torch.device("cpu"))  # type: ignore[arg-type]
        with torch.no_grad():
            answers.take(decoder.begin(prompts, [9, 9, 9]))
            held = {id(each): each.data_ptr() for each in tensors_of(answers, decoder._cache, *decoder._layers)}
            with NoWaiting():
                for _ in range(5):
                    answers.advance(decoder)
        after = {id(each): each.data_ptr() for each in tensors_of(answers, decoder._cache, *decoder._layers)}
        decoder.close()
        assert after == held
        assert answers.counts.max() == 6


def tensors_of(*owners: Any) -> list[torch.Tensor]:
    """All tensors that last longer than a step; `positions` are made anew, inside of what is recorded."""
    held = [(name, each) for owner in owners for name, each in vars(owner).items() if name != "positions"]
    return [each for _, each in held if isinstance(each, torch.Tensor)]


def test_draws_follow_the_distribution_that_was_asked_for() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    rows = 20000
    chance = CounterRNG(torch.arange(rows), torch.full((rows,), 4), 3).bits()
    assert 0 <= chance.min() <= chance.max() < 2**COUNTER_RNG_BITS
    assert abs(float(chance.double().mean()) / 2**COUNTER_RNG_BITS - 0.5) < 0.01
    assert len(set(chance.tolist())) > 0.99 * rows
    other = CounterRNG(torch.arange(rows), torch.full((rows,), 5), 3).bits()
    assert abs(float(torch.corrcoef(torch.stack([chance, other]).double())[0, 1])) < 0.03
    edges = torch.tensor([0, 2**COUNTER_RNG_BITS - 1])
    assert choose(logits.expand(2, 5), edges, Sampling(), None)[0].tolist() == [0, 4]
    assert choose(logits.expand(2, 5), edges, Sampling(top_p=0.01), None)[0].tolist() == [0, 0]
    for way in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.5)):
        assert choose(logits.expand(2, 5) * torch.nan, edges, way, None)[0].max() < 5
    ways: list[tuple[dict[str, Any], list[int]]] = [
        ({"temperature": 1.0}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.7, "top_k": 3}, [0, 1, 2]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 1]),
        ({"temperature": 2.0, "top_k": 4, "top_p": 0.75}, [0, 1, 2]),
    ]
    for way, kept in ways:
        token, logprob = choose(logits.expand(rows, 5), chance, Sampling(**way), None)
        scaled = torch.full((5,), -torch.inf)
        scaled[kept] = logits[kept] / way["temperature"]
        counts = torch.bincount(token, minlength=5) / rows
        torch.testing.assert_close(counts, scaled.softmax(-1), rtol=0, atol=0.02)
        torch.testing.assert_close(logprob, logits.log_softmax(-1)[token])


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"prompts": [[1], []]}, ["prompt 1"]),
    ({"prompts": [[1, 999]]}, ["prompt 0", "999", "255"]),
    ({"prompts": [[1] * 64]}, ["prompt 0", "64"]),
    ({"temperature": -1.0}, ["temperature=-1.0"]),
    ({"temperature": float("nan")}, ["temperature=nan"]),
    ({"top_p": 0.0}, ["top_p=0.0"]),
    ({"top_k": 0}, ["top_k=0"]),
    ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
    ({"stop": [""]}, ["stop=('',)"]),
    ({"stop": ["end"]}, ["stop='end'"]),
    ({"keys": [1, 2]}, ["1 prompt", "2 keys"]),
]


@pytest.mark.parametrize(("given", "named"), WRONG, ids=str)
def test_what_cannot_be_is_said_before_anything_is_computed(given: dict[str, Any], named: list[str]) -> None:
    with refused(GenerateError, *named):
        generate(make("gpt"), **{"prompts": [[1]], **given})


def test_perplexity_counts_every_token_but_the_first_once() -> None:
    model = make("llama").eval()
    texts = [[random.randrange(VOCABULARY) for _ in range(length)] for length in (1, 2, 17, 40)]
    whole = measure_perplexity(model, texts, window=63)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(torch.tensor([t[:-1]]))[0], torch.tensor(t[1:]), reduction="sum")
            for t in texts[1:]
        ]
    assert whole.tokens == 1 + 16 + 39
    assert whole.mean_loss == pytest.approx(float(sum(losses)) / whole.tokens, rel=1e-5)
    assert measure_perplexity(model, texts, window=8, stride=3).tokens == whole.tokens
    with refused(GenerateError, "perplexity", "tokens"):
        measure_perplexity(model, [[1]], window=8)


def test_a_model_that_returns_no_cache_is_asked_for_whole_rows() -> None:
    pytest.importorskip("transformers")
    model = build_model(HFConfig(config=tiny_config("recurrent_gemma").to_diff_dict())).eval()
    prompts = [[5, 9, 4], [7, 3, 8, 6, 2]]
    cached, plain = (
        generate(model, prompts, max_new_tokens=5, temperature=0.0, cache=cache) for cache in (True, False)
    )
    assert [answer.tokens for answer in cached] == [answer.tokens for answer in plain]
