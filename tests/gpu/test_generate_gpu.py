"""Recorded steps write what plain ones write, and a rollout leaves the memory as it was."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.generate import Generator, HybridEngine, Sampling, generate
from plait.generate.graph import WARM_UP
from plait.models import build_model, preset
from plait.strategy import prepare_manual
from plait.world import open_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all tokens": {"temperature": 1.0},
    "top k": {"temperature": 0.8, "top_k": 20},
    "top p": {"temperature": 1.0, "top_p": 0.9},
    "penalty": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.3},
}


def some_prompts(count: int, vocabulary: int = 256) -> list[list[int]]:
    return [[random.randrange(vocabulary) for _ in range(random.randint(1, 40))] for _ in range(count)]


def make(family: str, dtype: torch.dtype) -> torch.nn.Module:
    with torch.device("cuda"):
        model = build_model(preset(family, "tiny", seq_len=256)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(3.0)
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt", "moe"])
def test_recorded_steps_write_what_plain_ones_write(family: str, way: str) -> None:
    model, prompts = make(family, torch.float32), some_prompts(9)
    options: dict[str, Any] = {**WAYS[way], "max_new_tokens": 100, "seed": 4, "stop": range(0, 256, 60)}
    recorded = generate(model, prompts, graphs=True, **options)
    for other in ({"graphs": False}, {"cache": False}):
        pairs = list(zip(recorded, generate(model, prompts, **other, **options), strict=True))
        agreeing = [(ours, theirs) for ours, theirs in pairs if ours.tokens == theirs.tokens]
        assert len(agreeing) >= len(prompts) - 1  # batches of other sizes round differently, and a draw may be close
        for ours, theirs in agreeing:
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-3)


def test_a_recording_is_used_and_a_smaller_batch_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(id(self)), replay(self))[1])
    model, prompts = make("llama", torch.bfloat16), some_prompts(8)
    free = generate(model, prompts, max_new_tokens=150, seed=1)
    assert len(replays) >= 149 - WARM_UP
    assert len(set(replays)) == 1
    stop = sorted({token for each in free[:6] for token in each.tokens[:10]})
    replays.clear()
    ended = generate(model, prompts, max_new_tokens=150, seed=1, stop=stop)
    assert len(ended) == 8


def test_sixteen_bits_differ_by_rounding_only() -> None:
    model, prompts = make("llama", torch.bfloat16), some_prompts(4)
    found = generate(model, prompts, max_new_tokens=60, temperature=1.0)
    for prompt, completion in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.tokens], device="cuda"))[0, len(prompt) - 1 : -1]
        tokens = torch.tensor(completion.tokens, device="cuda")[:, None]
        expected = logits.float().log_softmax(-1).gather(1, tokens).squeeze(1).cpu()
        assert float((torch.tensor(completion.logprobs) - expected).abs().mean()) < 0.1


def test_a_stream_is_recorded_too() -> None:
    generator, sampling = Generator(make("llama", torch.float32)), Sampling(30, seed=2)
    (prompt,) = some_prompts(1)
    *_, last = generator.stream(prompt, sampling)
    assert [last.tokens] == [each.tokens for each in generator.generate([prompt], sampling)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_in_training_writes_and_gives_the_memory_back(precision: str) -> None:
    model = {"type": "llama", "vocab_size": 4096, "dim": 512, "layers": 4, "heads": 8, "seq_len": 256}
    config = parse_sections(model=model, precision=precision, optim={"type": "SGD", "lr": 1.0}).config
    engine = prepare_manual(config, open_world(config), model=None, say=lambda _line: None)
    hybrid = HybridEngine(engine, config, say=lambda _line: None)
    prompts, sampling = some_prompts(16, 4096), Sampling(64, seed=1)
    for turn in range(3):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        answers = hybrid.generate(prompts, sampling)
        gc.collect()
        if turn:  # in the first, libraries take what they keep
            assert torch.cuda.memory_allocated() - before < 2**20
        assert hybrid.verify(prompts, answers).agrees
        ids = torch.randint(0, 4096, (4, 33), device="cuda")
        loss = engine.forward(input_ids=ids[:, :-1], labels=ids[:, 1:])
        engine.backward(loss.sum / loss.count)
        engine.step()
