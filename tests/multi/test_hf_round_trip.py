"""A model goes from transformers into training, and back to transformers, which computes what we compute."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import Dataset

from plait import Runner
from plait.cli.main import main
from plait.distributed import materialize, stacks
from plait.models.hf import PRESETS
from plait.monitor import format_bytes
from plait.torch_internals import intercept_operations, tree_leaves
from tests.hf_models import tiny_config
from tests.multi.ranks import RankPool

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 256, 12
GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SAVED: dict[str, dict[str, Any]] = {
    "llama": {**PRESETS["tiny-llama"]["config"], "tie_word_embeddings": False},
    "tied llama": {**PRESETS["tiny-llama"]["config"], "tie_word_embeddings": True},
    "gpt2": {**PRESETS["tiny-gpt2"]["config"], **GPT2},
    "untied gpt2": {**PRESETS["tiny-gpt2"]["config"], **GPT2, "tie_word_embeddings": False},
    "qwen": {**PRESETS["tiny-qwen"]["config"], "tie_word_embeddings": False},
    "tied qwen": PRESETS["tiny-qwen"]["config"],
}
CONVERTED = (
    "mixtral", "gpt_neox", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "granitemoe", "olmoe",
    "phimoe", "minimax", "jamba", "ernie4_5_moe", "exaone_moe", "solar_open", "mellum", "beam", "hy_v3", "laguna",
    "qwen3_next", "qwen3_5_moe_text", "afmoe", "axk1", "flex_olmo", "cohere2_moe", "nemotron_h", "gpt_oss",
)  # fmt: skip
"""Models that `transformers` stores under other names or in other shapes than their modules have."""
PLAIN = ("mistral", "gemma2", "gemma3_text", "olmo2", "phi3", "opt", "bloom", "cohere", "starcoder2", "stablelm")
OWN: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", "kv_heads": 2, "rope_base": 5000.0},
    "tied llama": {"type": "llama", "tie_embeddings": True},
    "gpt": {"type": "gpt"},
    "untied gpt": {"type": "gpt", "tie_embeddings": False},
    "gpt without bias": {"type": "gpt", "bias": False},
}
SIZES = {"vocab_size": VOCABULARY, "dim": 32, "layers": 2, "heads": 4, "seq_len": 32}


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, seed: int) -> None:
        self.rows = torch.randint(VOCABULARY, (12, LENGTH + 1), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index, :-1], "labels": self.rows[index, 1:]}


def train(rank: int, size: int, model: dict[str, Any], folder: str, seed: int, **sections: Any) -> Tensor:
    """Three steps and a checkpoint; returns the logits of the trained model."""
    with Runner(
        model=model,
        data=Tokens(seed),
        optim={"lr": 1e-2},
        batch={"total": 4},
        train={"max_steps": 3},
        work_dir=folder,
        device="cpu",
        log={"console": "none", "sinks": []},
        **sections,
    ) as runner:
        runner.train()
        runner.engine.model.eval()
        with torch.no_grad():
            return runner.engine.model(probe(seed)).clone()


def train_with(rank: int, size: int, model: dict[str, Any], folder: str, seed: int, sections: dict[str, Any]) -> Tensor:
    return train(rank, size, model, folder, seed, **sections)


def probe(seed: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed + 1))


def plait(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["plait", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def theirs(folder: Path, seed: int) -> Tensor:
    """What transformers computes with the folder, every weight of which must have come from it."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {key: list(names) for key, names in told.items() if names} == {}
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model.eval()(probe(seed)).logits


def saved_by_transformers(folder: Path, config: dict[str, Any], seed: int) -> Path:
    torch.manual_seed(seed)
    described = transformers.AutoConfig.for_model(**config, initializer_range=0.2)
    transformers.AutoModelForCausalLM.from_config(described).save_pretrained(folder / "start", max_shard_size="60KB")
    return folder / "start"


def some_seed() -> int:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("name", SAVED)
def test_a_model_of_transformers_comes_back_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = some_seed()
    start = saved_by_transformers(tmp_path, SAVED[name], seed)
    ours = train(0, 1, {"type": "hf", "path": str(start)}, str(tmp_path / "run"), seed)
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--shard-size", "70KB")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert not torch.equal(theirs(start, seed), ours)
    assert torch.equal(theirs(tmp_path / "out", seed), ours)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", CONVERTED + PLAIN if metafunc.config.option.fresh else CONVERTED[:2])


def test_and_so_does_one_that_is_stored_in_another_form(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = some_seed()
    described = tiny_config(model_type)
    described.vocab_size = VOCABULARY
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(described)
    model.save_pretrained(tmp_path / "start", max_shard_size="60KB")
    ours = train(0, 1, {"type": "hf", "path": str(tmp_path / "start")}, str(tmp_path / "run"), seed)
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--shard-size", "70KB")
    assert stored_names(tmp_path / "out") == stored_names(tmp_path / "start")
    assert not torch.allclose(theirs(tmp_path / "start", seed), ours)
    # The same numbers, added in another order where the experts are computed in another way.
    torch.testing.assert_close(theirs(tmp_path / "out", seed), ours, rtol=1e-5, atol=1e-5)


def stored_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= set(opened.keys())
    return names


def experts_of_half(rank: int, size: int, folder: str, seed: int) -> tuple[Tensor, list[str], int]:
    """Train as experts of two ranks, with ZeRO; returns the logits, what was logged, and the largest tensor made."""
    largest = 0

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal largest
        result = func(*args, **kwargs)
        held = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not t.is_meta and t.ndim >= 3]
        largest = max([largest, *(t.untyped_storage().nbytes() for t in held)])
        return result

    original = materialize.initialize

    def watched(*args: Any, **kwargs: Any) -> None:
        with intercept_operations(run):
            original(*args, **kwargs)

    stacks.BLOCK = 1  # a row at a time
    materialize.initialize = watched
    logged: list[str] = []
    try:
        with Runner(
            model={"type": "hf", "path": f"{folder}/start"},
            data=Tokens(seed),
            optim={"lr": 1e-2},
            batch={"total": 4},
            train={"max_steps": 2},
            strategy={"zero": 3},
            work_dir=f"{folder}/run",
            device="cpu",
            log={"console": "none", "sinks": ["jsonl"]},
        ) as runner:
            runner.train()
            runner.engine.model.eval()
            with torch.no_grad():
                logits = runner.engine.model(probe(seed)).clone()
    finally:
        materialize.initialize = original
    if rank == 0:
        logged = [line for file in Path(folder, "run").rglob("*.jsonl") for line in file.read_text().splitlines()]
    return logits, logged, largest


def test_each_rank_of_a_mixture_makes_and_reads_only_its_share(
    two_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = some_seed()
    described = tiny_config("mixtral")
    described.vocab_size = VOCABULARY
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(described)
    model.save_pretrained(tmp_path / "start")
    (logits, logged, _), _ = answers = two_ranks.run(experts_of_half, str(tmp_path), seed)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    assert max(largest for *_, largest in answers) <= stack.nbytes // 2
    total = sum(param.nbytes for param in model.parameters())
    (line,) = [line for line in logged if "pretrained weights" in line]
    assert f"{format_bytes(total)} read per rank" in line
    read = float(re.search(r"([\d.]+) KiB of", line)[1]) * 1024  # type: ignore[index]
    assert read < 0.6 * total
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    torch.testing.assert_close(theirs(tmp_path / "out", seed), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["tied qwen", "llama"])
def test_and_from_two_ranks_that_each_held_a_part(
    name: str, two_ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = some_seed()
    model = {"type": "hf", "path": str(saved_by_transformers(tmp_path, SAVED[name], seed))}
    parts = two_ranks.run(train_with, model, str(tmp_path / "run"), seed, {"strategy": {"zero": 3}})
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert torch.equal(theirs(tmp_path / "out", seed), parts[0])


def test_a_model_that_was_described_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = some_seed()
    ours = train(0, 1, {"type": "hf", "config": SAVED["qwen"]}, str(tmp_path / "run"), seed)
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert torch.equal(theirs(tmp_path / "out", seed), ours)


@pytest.mark.parametrize("name", OWN)
def test_models_of_our_own_compute_the_same_in_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = some_seed()
    ours = train(0, 1, {**SIZES, **OWN[name]}, str(tmp_path / "run"), seed)
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    # The same numbers, added in another order.
    torch.testing.assert_close(theirs(tmp_path / "out", seed), ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "tied llama", "gpt", "untied gpt"])
def test_and_come_back_as_they_were(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = some_seed()
    model = {**SIZES, **OWN[name]}
    train(0, 1, model, str(tmp_path / "run"), seed)
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "hf", "--to", "hf")
    plait(monkeypatch, "convert", tmp_path / "hf", tmp_path / "back", "--to", "plait", "--model", OWN[name]["type"])
    with Runner(
        model=model,
        data=Tokens(seed),
        train={"max_steps": 1},
        checkpoint={"resume": str(tmp_path / "back"), "partial": ["optim.*"]},
        work_dir=str(tmp_path / "again"),
        device="cpu",
        log={"console": "none", "sinks": []},
    ) as runner:
        runner.setup()
        found = {k: v.clone() for k, v in runner.engine.state_tensors().items() if k.startswith("model.")}
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "run.pt", "--to", "torch")
    expected = torch.load(tmp_path / "run.pt", weights_only=True)
    assert found.keys() == {f"model.{key}" for key in expected}
    assert all(torch.equal(found[f"model.{key}"], tensor) for key, tensor in expected.items())


def test_the_average_of_the_weights_can_be_exported_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = some_seed()
    hooks = [{"type": "ema", "decay": 0.5}]
    ours = train(0, 1, {"type": "hf", "config": SAVED["gpt2"]}, str(tmp_path / "run"), seed, hooks=hooks)
    with Runner(
        model={"type": "hf", "config": SAVED["gpt2"]},
        data=Tokens(seed),
        train={"max_steps": 3},
        checkpoint={"resume": "auto"},
        hooks=hooks,
        work_dir=str(tmp_path / "run"),
        device="cpu",
        log={"console": "none", "sinks": []},
    ) as runner:
        runner.train()
        for hook in runner.hooks.before_validate:
            hook(runner)
        runner.engine.model.eval()
        with torch.no_grad():
            average = runner.engine.model(probe(seed))
    plait(monkeypatch, "convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--weights", "ema")
    assert not torch.equal(average, ours)
    assert torch.equal(theirs(tmp_path / "out", seed), average)
