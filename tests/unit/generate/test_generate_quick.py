"""The short way for single tokens says what the usual one says, kernels included where Triton's interpreter runs."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from plait.config.model import GptConfig, LlamaConfig, MoeConfig
from plait.generate import Generator, Sampling, cached, generate
from plait.generate.batch import WARM_UP, CapturedStep, choose
from plait.generate.cached import CachedDecoder, LlamaDecodeStep, can_use_decode_kernels
from plait.kernels.decode.sampling import CounterRNG
from plait.kernels.triton import interprets
from plait.models import build_model
from plait.models.fused import fuse

VOCABULARY = 61
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 160}


def make(*, fused: bool = False, **changes: Any) -> nn.Module:
    model = build_model(LlamaConfig(**{**SHAPE, **changes}))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.ndim > 1 else param.add_(0.2 * torch.randn_like(param))
    if fused:
        fuse(model)
    return model


def some_prompts(count: int) -> list[list[int]]:
    return [[random.randrange(VOCABULARY) for _ in range(random.randint(1, 100))] for _ in range(count)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[LlamaDecodeStep]:
    """Take the short way wherever it would be taken with kernels; the twins stand in for them. Returns the steps."""
    made: list[LlamaDecodeStep] = []

    class Counted(LlamaDecodeStep):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("plait.generate.cached.has_kernels", lambda _: True)
    monkeypatch.setattr(cached, "LlamaDecodeStep", Counted)
    return made


@pytest.mark.parametrize(("fused", "tied"), [(False, True), (True, False)])
def test_rows_of_any_length_are_written_as_without_a_cache(
    always: list[LlamaDecodeStep], fused: bool, tied: bool
) -> None:
    model, prompts = make(fused=fused, tie_embeddings=tied), some_prompts(3)
    options: dict[str, Any] = {"max_new_tokens": 8, "seed": 3, "stop": range(0, VOCABULARY, 9)}
    for temperature in (0.0, 1.0):
        quick = generate(model, prompts, temperature=temperature, **options)
        assert always
        always.clear()
        plain = generate(model, prompts, temperature=temperature, cache=False, **options)
        assert not always
        for ours, theirs in zip(quick, plain, strict=True):
            assert ours.tokens == theirs.tokens
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4)


def test_rows_that_are_done_leave_and_full_ones_disturb_nobody(always: list[LlamaDecodeStep]) -> None:
    model, rows = make().eval(), [[1, 2, 3], [4] * 70, [5], [6, 7]]
    alone, decoder = deepcopy(model), CachedDecoder(model, torch.device("cpu"))
    with torch.no_grad():
        decoder.begin(rows, [6, 2, 6, 6])
        for step in range(5):
            tokens = torch.randint(VOCABULARY, (len(rows),))
            found = decoder.step(tokens)
            rows = [[*row, int(token)] for row, token in zip(rows, tokens, strict=True)]
            for row, logits in zip(rows, found, strict=True):
                if len(row) <= 72:  # the long one has room for two
                    torch.testing.assert_close(logits, alone(torch.tensor([row]))[0, -1], rtol=1e-4, atol=1e-4)
            if step == 3:
                decoder.keep(torch.tensor([0, 3]))
                rows = [rows[0], rows[3]]
    assert len(always) == 1
    decoder.close()


def test_a_stream_and_small_batches_go_the_short_way_too(always: list[LlamaDecodeStep]) -> None:
    model, sampling = make(), Sampling(6, seed=5)
    (prompt,) = some_prompts(1)
    *_, last = Generator(model).stream(prompt, sampling)
    whole = Generator(model, max_rows=1).generate([prompt, prompt], sampling, keys=[0, 0])
    assert [last, last] == whole
    assert len(always) == 3


def test_anything_unusual_keeps_its_own_step(always: list[LlamaDecodeStep]) -> None:
    assert can_use_decode_kernels(make())
    assert can_use_decode_kernels(make(fused=True).bfloat16())
    assert not can_use_decode_kernels(build_model(GptConfig(vocab_size=64, dim=64, layers=1, heads=2, seq_len=64)))
    assert not can_use_decode_kernels(build_model(MoeConfig(**SHAPE, experts=2)))
    assert not can_use_decode_kernels(make(heads=8, kv_heads=8))  # heads of 8
    assert not can_use_decode_kernels(make().half())

    def changed(change: Any) -> bool:
        model: Any = make()
        change(model)
        return can_use_decode_kernels(model)

    class Adapted(nn.Linear):
        pass

    def adapt(model: Any) -> None:
        model.blocks[1].ffn.up.__class__ = Adapted

    assert not changed(adapt)
    assert not changed(lambda m: m.blocks[0].register_forward_hook(lambda *_: None))
    assert not changed(lambda m: m.blocks[0].attention.q.double())
    assert not changed(lambda m: setattr(m.blocks[0].attention, "attend", lambda *_: None))
    assert not changed(lambda m: m.blocks[0].attention.q.register_parameter("bias", nn.Parameter(torch.zeros(64))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not can_use_decode_kernels(make())
        assert can_use_decode_kernels(make().bfloat16())


@pytest.mark.skipif(interprets(), reason="the interpreter is where kernels are")
def test_without_kernels_a_model_keeps_its_own_step() -> None:
    assert not can_use_decode_kernels(make())


def test_prompts_are_read_in_parts_and_the_model_is_as_before(
    always: list[LlamaDecodeStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = make(), [[1], [2] * 3, [3] * 30, [4] * 31, [5] * 90, [6] * 40]
    whole = generate(model, prompts, max_new_tokens=4)
    kinds = [(type(part), vars(part).get("rotate"), vars(part).get("attend")) for part in model.modules()]
    monkeypatch.setattr(cached, "PREFILL_TOKENS", 64)
    assert cached.chunks_of(prompts) == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    assert cached.chunks_of([[1], *[[2] * 64] * 2]) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    for parts, completion in zip(generate(model, prompts, max_new_tokens=4), whole, strict=True):
        assert parts.tokens == completion.tokens
        torch.testing.assert_close(torch.tensor(parts.logprobs), torch.tensor(completion.logprobs), rtol=0, atol=1e-5)
    assert [(type(part), vars(part).get("rotate"), vars(part).get("attend")) for part in model.modules()] == kinds


def test_a_step_is_set_up_once_for_each_size_and_way(always: list[LlamaDecodeStep]) -> None:
    decoder = CachedDecoder(make(), torch.device("cpu"))
    asked: list[bool] = []
    with torch.no_grad():
        for prompts in ([[1], [2]], [[3], [4]], [[5] * 80, [6]]):  # the last ones need a longer cache
            decoder.begin(prompts, [6, 6])
            asked += [decoder.is_warm(Sampling(6)), decoder.is_warm(Sampling(6, top_k=3))]
        decoder.keep(torch.tensor([1]))
        asked.append(decoder.is_warm(Sampling(6)))
    decoder.close()
    assert asked == [False, False, True, True, False, False, False]


@pytest.mark.parametrize("warm", [False, True])
def test_a_step_is_recorded_when_it_is_set_up(monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    done: list[str] = []

    class Recording:
        def replay(self) -> None:
            done.append("repeated")

    monkeypatch.setattr("plait.generate.batch.capture_graph", lambda _: Recording())
    step = CapturedStep(lambda: done.append("done"), on=True, is_warm=lambda: warm)
    for _ in range(2):
        done.clear()
        for _ in range(4):
            step()
        first = 0 if warm else WARM_UP
        assert done == ["done"] * first + ["repeated"] * (4 - first)
        step.forget()


def test_the_likeliest_token_is_that_of_the_logits(always: list[LlamaDecodeStep]) -> None:
    model, prompts = make().eval(), some_prompts(3)
    decoders = [CachedDecoder(each, torch.device("cpu")) for each in (model, deepcopy(model))]
    with torch.no_grad():
        for decoder in decoders:
            decoder.begin(prompts, [5] * 3)
        tokens = torch.randint(VOCABULARY, (3,))
        for _ in range(4):
            chosen, logprobs = decoders[0].step_greedy(tokens)
            logits = decoders[1].step(tokens)
            assert torch.equal(chosen, logits.argmax(1))
            torch.testing.assert_close(logprobs, logits.log_softmax(1).max(1).values)
            tokens = chosen
    for decoder in decoders:
        decoder.close()


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_what_is_drawn_is_what_the_logits_give(always: list[LlamaDecodeStep], temperature: float) -> None:
    model, prompts = make().eval(), some_prompts(3)
    decoders = [CachedDecoder(each, torch.device("cpu")) for each in (model, deepcopy(model))]
    keys, counts = torch.randint(999, (3,)), torch.zeros(3, dtype=torch.int64)
    with torch.no_grad():
        for decoder in decoders:
            decoder.begin(prompts, [5] * 3)
        tokens = torch.randint(VOCABULARY, (3,))
        for _ in range(4):
            chance = CounterRNG(keys, counts, 7)
            found = decoders[0].step_sample(tokens, temperature, chance)
            logits = decoders[1].step(tokens)
            wanted = choose(logits, chance.bits(), Sampling(temperature=temperature), None)
            assert torch.equal(found[0], wanted[0])
            torch.testing.assert_close(found[1], wanted[1])
            torch.testing.assert_close(found[1], logits.log_softmax(1).gather(1, found[0][:, None]).squeeze(1))
            tokens, counts = found[0], counts + 1
    for decoder in decoders:
        decoder.close()


@pytest.mark.parametrize(
    ("way", "steps"),
    [({"temperature": 0.0}, "step_greedy"), ({}, "step_sample"), ({"temperature": 0.5, "top_p": 1.0}, "step_sample")]
    + [({changed: value}, "step") for changed, value in (("top_k", 3), ("top_p", 0.9), ("repetition_penalty", 1.1))],
)
def test_each_way_of_choosing_has_its_step(monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], steps: str) -> None:
    taken: set[str] = set()
    usual_call = LlamaDecodeStep.__call__
    for name in ("step_greedy", "step_sample", "step"):
        usual = getattr(CachedDecoder, name)

        def noted(self: Any, *args: Any, name: str = name, usual: Any = usual) -> Any:
            taken.add(name)
            return usual(self, *args)

        monkeypatch.setattr(CachedDecoder, name, noted)
    monkeypatch.setattr("plait.generate.cached.has_kernels", lambda _: True)
    monkeypatch.setattr(LlamaDecodeStep, "__call__", lambda self, *args: taken.add("logits") or usual_call(self, *args))
    generate(make(), some_prompts(2), max_new_tokens=4, **way)
    assert taken == ({"step", "logits"} if steps == "step" else {steps})


def test_another_seed_needs_no_setting_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    usual = CachedDecoder.is_warm

    def noted(self: CachedDecoder, way: Any) -> bool:
        asked.append(usual(self, way))
        return asked[-1]

    monkeypatch.setattr(CachedDecoder, "is_warm", noted)
    generator = Generator(make())
    for seed, temperature in ((1, 1.0), (2, 1.0), (2, 0.9)):
        generator.generate([[1, 2]], Sampling(4, seed=seed, temperature=temperature))
    assert asked == [False, True, False]
