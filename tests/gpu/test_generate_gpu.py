"""Recorded steps write what plain ones write, and a rollout leaves the memory as it was."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.distributed import open_world
from plait.engine import Preparation, prepare_manual
from plait.generate import Generator, HybridEngine, Sampling, generate
from plait.generate.batch import WARM_UP
from plait.generate.cached import CachedDecoder, LlamaDecodeStep
from plait.kernels.cuda_graphs import capture_graph
from plait.kernels.decode.attention import attend_cached
from plait.kernels.decode.embed_sample import RowPositions, embed, greedy_head, sample_head
from plait.kernels.decode.sampling import COUNTER_RNG_BITS, CounterRNG, greedy, sample_tokens, sample_tokens_plain
from plait.kernels.decode.skinny_gemm import (
    CONFIGS,
    GemmConfig,
    Norm,
    ResidualStream,
    add,
    gated,
    make_counters,
    project,
)
from plait.models import build_model, preset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "all tokens": {"temperature": 1.0},
    "all tokens, colder": {"temperature": 0.6},
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


NEAR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounding explains the difference."""
    assert (ours.double() - exact).abs().max() <= NEAR[ours.dtype] * exact.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 17, 32, 50, 128, 150])
def test_kernels_of_single_tokens_agree_with_float64(rows: int, dtype: torch.dtype) -> None:
    width, kv, hidden, vocabulary, head_dim, slots = 512, 128, 1408, 20000, 64, 320

    def made(*shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * by).to(dtype)

    def wide(stream: ResidualStream) -> ResidualStream:
        return ResidualStream(stream.x.double(), Norm(stream.norm.weight.double(), stream.norm.eps))

    counters, norms = make_counters(torch.device("cuda")), [Norm(1.0 + made(width, by=0.1), 1e-5) for _ in range(2)]
    stream = embed(torch.randint(90, (rows,), device="cuda"), made(90, width), norms[0])
    weights = [made(each, width, by=width**-0.5) for each in (width, kv, kv)]
    down, head = made(width, hidden, by=hidden**-0.5), made(vocabulary, width, by=width**-0.5)
    gate, up = made(hidden, width, by=width**-0.5), made(hidden, width, by=width**-0.5)
    for _ in range(3):
        mixed = project(stream, weights, counters)
        assert_near(mixed, project(wide(stream), [each.double() for each in weights], counters))
        inner = gated(stream, gate, up)
        assert_near(inner, gated(wide(stream), gate.double(), up.double()))
        after = add(stream, inner, down, norms[1], counters)
        assert_near(after.x, add(wide(stream), inner.double(), down.double(), norms[1], counters).x)
        logits = project(after, [head], counters)
        assert_near(logits, project(wide(after), [head.double()], counters))
        token, logprob = greedy(logits)
        exact = logits.double().log_softmax(-1)
        torch.testing.assert_close(logprob.double(), exact.max(-1).values, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits.gather(1, token[:, None])[:, 0], logits.max(-1).values)
        chosen, its_logprob = greedy_head(after, head, counters)
        assert torch.equal(chosen, token)
        torch.testing.assert_close(its_logprob, logprob, rtol=1e-5, atol=1e-5)
        keys, values = (made(rows, kv // head_dim, slots, head_dim) for _ in range(2))
        places = torch.randint(slots, (rows,), device="cuda")
        table = torch.randn(slots, head_dim // 2, device="cuda").cos(), torch.randn(slots, head_dim // 2, device="cuda")
        caches = keys.double(), values.double()
        found = attend_cached(mixed, *table, keys, values, places, counters)
        wanted = attend_cached(mixed.double(), table[0].double(), table[1].double(), *caches, places, counters)
        assert_near(found, wanted)
        assert_near(keys, caches[0])
        assert torch.equal(values.double(), caches[1])
        assert not counters.any()
        stream = after


@pytest.mark.parametrize("rows", [3, 40, 100])
def test_a_llama_of_sixteen_bits_takes_the_short_way_and_says_what_it_says(rows: int) -> None:
    config = preset("llama", "tiny", seq_len=256, dim=256, heads=4, kv_heads=2)
    with torch.device("cuda"):
        model = build_model(config).bfloat16().eval()
        exact = build_model(config).eval()
    exact.load_state_dict(model.state_dict())
    decoder, texts = CachedDecoder(model, torch.device("cuda")), some_prompts(rows)
    with torch.no_grad():
        decoder.begin(texts, [20] * rows)
        assert decoder._step is not None
        for step in range(20):
            tokens = torch.randint(256, (rows,), device="cuda")
            logits = decoder.step(tokens)
            texts = [[*text, int(token)] for text, token in zip(texts, tokens, strict=True)]
            for row in random.sample(range(rows), 2) if step % 5 == 4 else ():
                wanted = exact(torch.tensor([texts[row]], device="cuda"))[0, -1]
                assert_near(logits[row], wanted.double())
    decoder.close()


def assert_drawn(logits: torch.Tensor, temperature: float, chance: CounterRNG, found: tuple[torch.Tensor, ...]) -> None:
    """The chance lies in the token's share of the row, up to rounding, and the log-probability is the model's."""
    place, aim, close = found[0][:, None], chance.bits().double() / 2**COUNTER_RNG_BITS, 4e-6
    share = (logits.double() / temperature).softmax(-1)
    high, own = (each.gather(1, place).squeeze(1) for each in (share.cumsum(-1), share))
    assert (own > 0).all()
    assert (aim - high).max() <= close
    assert (high - own - aim).max() <= close
    exact = logits.double().log_softmax(-1).gather(1, place).squeeze(1)
    torch.testing.assert_close(found[1].double(), exact, rtol=1e-5, atol=1e-5)


def some_chance(rows: int) -> CounterRNG:
    keys, counts = torch.randint(2**40, (rows,), device="cuda"), torch.randint(2**12, (rows,), device="cuda")
    return CounterRNG(keys, counts, random.randrange(-(2**63), 2**63))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("rows", [1, 8, 32, 50, 128, 200])
def test_the_head_of_a_llama_draws_from_all_its_words(rows: int, temperature: float) -> None:
    vocabulary, width, counters = 128256, 2048, make_counters(torch.device("cuda"))
    with torch.device("cuda"):
        head = (torch.randn(vocabulary, width) * 2.0 * width**-0.5).bfloat16()
        norm = Norm((1.0 + 0.1 * torch.randn(width)).bfloat16(), 1e-5)
        stream = embed(torch.randint(900, (rows,)), torch.randn(900, width).bfloat16(), norm)
    tables: list[dict[tuple[str, int], GemmConfig | None]] = [dict(CONFIGS)]
    if rows <= 32:  # the same words, in tiles of another size
        tables.append({**CONFIGS, ("wide", 16): CONFIGS["wide", 32], ("wide", 32): CONFIGS["wide", 16]})
    for table in tables:
        chance, logits = some_chance(rows), project(stream, [head], counters, table=table)
        found = sample_head(stream, head, temperature, chance, counters, table=table)
        assert_drawn(logits, temperature, chance, found)
        for other in (
            sample_head(stream, head, temperature, chance, counters, table=table),
            sample_tokens(logits, temperature, chance),
        ):
            assert torch.equal(found[0], other[0])
            torch.testing.assert_close(found[1], other[1], rtol=1e-5, atol=1e-5)
        plain = sample_tokens_plain(logits, temperature, chance)
        assert_drawn(logits, temperature, chance, plain)
        assert (plain[0] != found[0]).sum() <= 3 + rows // 8
        some = torch.randperm(rows, device="cuda")[: max(1, rows // 3)]
        part = sample_tokens(logits[some], temperature, CounterRNG(chance.keys[some], chance.counts[some], chance.seed))
        assert torch.equal(part[0], found[0][some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 65, 9001, 50257])
def test_draws_from_given_logits_agree_with_float64(vocabulary: int, dtype: torch.dtype) -> None:
    for temperature in (0.3, 0.7, 1.0, 2.0):
        rows = random.randint(7, 130)
        logits = (random.choice((0.1, 1.0, 4.0)) * torch.randn(rows, vocabulary, device="cuda")).to(dtype)
        logits[0, 1 : vocabulary // 2] = -torch.inf
        chance = some_chance(rows)
        assert_drawn(logits, temperature, chance, sample_tokens(logits, temperature, chance))
        logits[1], logits[2, 0], logits[3], logits[4, -1] = torch.nan, torch.nan, -torch.inf, torch.inf
        token, logprob = sample_tokens(logits, temperature, chance)
        assert ((token >= 0) & (token < vocabulary)).all()
        assert logprob[1:5].isnan().all()
        assert logprob[5:].isfinite().all()
        assert logprob[0].isfinite()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_come_as_often_as_they_should(temperature: float) -> None:
    draws, vocabulary = 400_000, 500
    logits = torch.randn(vocabulary, device="cuda")
    keys = torch.arange(draws, device="cuda")
    chance = CounterRNG(keys, torch.full_like(keys, random.randrange(99)), random.randrange(2**40))
    token, _ = sample_tokens(logits.repeat(draws, 1), temperature, chance)
    expected = draws * (logits.double() / temperature).softmax(-1)
    far = ((torch.bincount(token, minlength=vocabulary) - expected).square() / expected).sum()
    assert torch.special.gammaincc(torch.tensor((vocabulary - 1) / 2).double(), far.cpu() / 2) > 1e-9


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rows", [8, 32, 128])
def test_kernels_that_overlap_find_what_kernels_in_turn_find(
    rows: int, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("llama", "tiny", seq_len=512, vocab_size=20000, dim=1024, layers=4, heads=16, kv_heads=4)
    with torch.device("cuda"):
        model = build_model(config).bfloat16().eval()
        start, token = torch.randint(1, 200, (rows,)), torch.randint(20000, (rows,))
        caches = torch.randn(4, 2, rows, 4, 320, 64, dtype=torch.bfloat16)

    def written(**how: Any) -> list[torch.Tensor]:
        own, latest = caches.clone(), token.clone()
        at, quick = (
            RowPositions(start.clone(), torch.full_like(start, 319), start.clone()),
            LlamaDecodeStep(model, 320, **how),
        )
        every, logprobs = torch.zeros(rows, 100, dtype=torch.int64, device="cuda"), torch.zeros(rows, device="cuda")

        def step() -> None:
            layers: Any = [tuple(layer) for layer in own]
            if sampled:
                chosen, logprob = quick.step_sample(latest, at, layers, 0.8, CounterRNG(start, at.lengths, 5))
            else:
                chosen, logprob = quick.step_greedy(latest, at, layers)
            every.scatter_(1, (at.lengths - 1 - start)[:, None], chosen[:, None])
            logprobs.add_(logprob)
            latest.copy_(chosen)

        with torch.no_grad():
            step()
            graph = capture_graph(step)
            for _ in range(99):
                graph.replay()
        return [every, logprobs, own]

    overlapping = [written(), written(prefetch_bytes=16 << 20), written(early=False)]
    monkeypatch.setattr("plait.kernels.decode.dependent_launch.HAS_DEPENDENT_LAUNCH", False)
    in_turn = written(early=False)
    for found in overlapping:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, in_turn, strict=True))


def test_a_stream_is_recorded_too() -> None:
    generator, sampling = Generator(make("llama", torch.float32)), Sampling(30, seed=2)
    (prompt,) = some_prompts(1)
    *_, last = generator.stream(prompt, sampling)
    assert [last.tokens] == [each.tokens for each in generator.generate([prompt], sampling)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_policy_in_training_writes_and_gives_the_memory_back(precision: str) -> None:
    model = {"type": "llama", "vocab_size": 4096, "dim": 512, "layers": 4, "heads": 8, "seq_len": 256}
    config = parse_sections(model=model, precision=precision, optim={"type": "SGD", "lr": 1.0}).config
    engine = prepare_manual(Preparation(config, open_world(config), model=None, log=lambda _line: None))
    hybrid = HybridEngine(engine, config, log=lambda _line: None)
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


@pytest.mark.parametrize("family", ["llama", "gpt", "moe"])
def test_rows_that_join_a_recorded_batch_get_what_they_get_alone(family: str) -> None:
    random.seed(5)
    model, prompts = make(family, torch.float32), some_prompts(len(WAYS))
    generator = Generator(model)
    samplings = [Sampling(60, seed=number, **way) for number, way in enumerate(WAYS.values())]
    alone = [generator.generate([prompt], each)[0].tokens for prompt, each in zip(prompts, samplings, strict=True)]
    rows = [generator.row(prompt, each, top=2) for prompt, each in zip(prompts, samplings, strict=True)]
    found: list[list[int]] = [[] for _ in rows]
    with generator.continuous() as batch:
        live: list[int] = []
        for step in range(200):
            new = [step // 7] if step % 7 == 0 and step // 7 < len(rows) else []
            if new:
                for token in batch.add([rows[number] for number in new]):
                    found[new[0]].append(token.id)
                live += new
            else:
                for number, token in zip(live, batch.step(), strict=True):
                    found[number].append(token.id)
            kept = [place for place, number in enumerate(live) if len(found[number]) < rows[number].max_new_tokens]
            batch.keep(kept)
            live = [live[place] for place in kept]
            if not live:
                break
    assert found == alone
