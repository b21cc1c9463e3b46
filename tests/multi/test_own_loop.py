"""A loop of the user's own: its checkpoints, its evaluation, and what its model is called with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.checkpoint import open_checkpoint
from plait.engine import Engine
from plait.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from plait.trainer import Accuracy, Runner
from tests.multi.parity import MODEL, full_tensors, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import missing, refused

TP2 = {"layout": {"tp": 2}}
PP2 = {"layout": {"pp": 2}}
TOKENS = token_batches(4, 8)


def engine_of(strategy: Any, *, seed: int = 3, **sections: Any) -> Engine:
    sections = {"accumulation": 8 if strategy == PP2 else 1, **sections}
    optim = {"type": "AdamW", "lr": 1e-2, "eps": 0.1}
    return plait.prepare(
        MODEL, optim=optim, strategy=strategy, seed=seed, device="cpu", total_steps=5,
        schedule={"type": "CosineAnnealingLR"}, **sections,
    )  # fmt: skip


def mine(engine: Engine, batches: list[Any]) -> list[Any]:
    return batches[engine.world.data_rank :: engine.world.layout.data_parallel]


def steps(engine: Engine, first: int, end: int) -> list[float]:
    return [engine.train_step(mine(engine, step)).loss for step in TOKENS[first:end]]


def save_after_two(rank: int, size: int, strategy: Any, folder: str, extra: Any = None) -> list[float]:
    engine = engine_of(strategy)
    losses = steps(engine, 0, 2)
    assert engine.save(folder, extra=extra) == Path(folder)
    return losses


def continue_from(rank: int, size: int, strategy: Any, folder: str) -> Any:
    engine = engine_of(strategy, seed=99)
    extra = engine.load(folder)
    assert engine.steps == 2
    return extra, steps(engine, 2, 5), full_tensors(engine.state_tensors())


def uninterrupted() -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of("single")
    return steps(engine, 0, 5), full_tensors(engine.state_tensors())


@pytest.mark.parametrize(("before", "after"), [("zero2", "zero3"), (TP2, "ddp"), (PP2, "zero1")], ids=str)
def test_what_one_strategy_saved_another_continues_on_another_number_of_ranks(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, before: Any, after: Any
) -> None:
    losses, tensors = uninterrupted()
    extra = {"best": 0.25, "seen": [1, 2, {"shard": "a"}], "limit": float("inf"), "none": None}
    begun = two_ranks.run(save_after_two, before, str(tmp_path / "saved"), extra)[0]
    for found_extra, continued, found in four_ranks.run(continue_from, after, str(tmp_path / "saved")):
        assert found_extra == extra
        assert [*begun, *continued] == pytest.approx(losses, rel=1e-5)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_the_newest_of_several_is_taken_and_random_numbers_continue(tmp_path: Path) -> None:
    engine = engine_of("single")
    for end in (1, 2):
        steps(engine, end - 1, end)
        engine.save(tmp_path / f"step-{engine.steps:08d}", extra={"end": end})
    drawn = torch.rand(3)
    again = engine_of("single", seed=5)
    assert again.load(tmp_path) == {"end": 2}
    assert torch.equal(torch.rand(3), drawn)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    engine = engine_of("single")
    engine.save(tmp_path / "a")
    with refused(CheckpointError, "engine.save", tmp_path / "a"):
        engine.save(tmp_path / "a")
    assert open_checkpoint(tmp_path / "a").manifest.step == 0
    (tmp_path / "b").mkdir()
    with refused(CheckpointError, "engine.save", tmp_path / "b"):
        engine.save(tmp_path / "b")


@pytest.mark.parametrize(
    ("extra", "key"),
    [({"a": torch.ones(1)}, "extra['a']"), ({"a": [1, (2,)]}, "extra['a'][1]"), ({3: 1}, "extra[3]")],
)
def test_what_would_not_come_back_as_it_was_is_refused(tmp_path: Path, extra: Any, key: str) -> None:
    with refused(CheckpointError, key):
        engine_of("single").save(tmp_path / "a", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_half_a_step_is_in_no_checkpoint(tmp_path: Path) -> None:
    engine = engine_of("single", accumulation=2)
    engine.backward(engine(TOKENS[0][0]))
    for call in (lambda: engine.save(tmp_path / "a"), lambda: engine.load(tmp_path / "a")):
        with refused(TrainingError, "1 micro-batch"):
            call()


def test_another_optimizer_or_a_place_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    engine_of("single").save(tmp_path / "a")
    other = plait.prepare(MODEL, optim={"type": "SGD", "lr": 0.1}, device="cpu")
    with refused(CheckpointError, tmp_path / "a", "optim.type", "SGD"):
        other.load(tmp_path / "a")
    with refused(CheckpointError, tmp_path / "nothing", "manifest.json"):
        other.load(tmp_path / "nothing")


def test_a_runner_resumes_from_it_and_it_loads_what_a_runner_saved(tmp_path: Path) -> None:
    engine = engine_of("single")
    steps(engine, 0, 2)
    engine.save(tmp_path / "saved")
    rows = [{key: value[0] for key, value in batch.items()} for step in TOKENS for batch in step]
    common: dict[str, Any] = {
        "optim": {"type": "AdamW", "lr": 1e-2}, "device": "cpu", "work_dir": str(tmp_path / "run"),
        "log": {"console": "none", "sinks": []}, "batch": {"total": 4},
    }  # fmt: skip
    resumed = {"train": {"max_steps": 3}, "checkpoint": {"resume": str(tmp_path / "saved")}}
    with Runner(MODEL, rows, **common, **resumed) as runner:
        runner.setup()
        assert runner.step == 2
        before = full_tensors(runner.engine.state_tensors())
        runner.train()
        after = full_tensors(runner.engine.state_tensors())
    for name, tensor in full_tensors(engine.state_tensors()).items():
        assert torch.equal(before[name], tensor)
    other = engine_of("single", seed=8)
    assert other.load(tmp_path / "run") == {}
    assert other.steps == 3
    for name, tensor in full_tensors(other.state_tensors()).items():
        assert torch.equal(after[name], tensor)


# ---- evaluate

COUNTS = [3, 1, 2, 4]
"""Micro-batches of each rank."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def weighted(outputs: Tensor, batch: Any) -> plait.LossTerm:
    """A loss that sees the fields of the batch that the model does not take."""
    target, weight = (batch["y"], batch["weight"]) if isinstance(batch, dict) else (batch[1], 1.0 + batch[1] % 3)
    losses = F.cross_entropy(outputs.float(), target, reduction="none")
    return plait.LossTerm((losses * weight).sum(), weight.sum())


def pairs(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for size in torch.randint(1, 5, (count,), generator=generator).tolist()
    ]


def evaluate_unequally(rank: int, size: int, strategy: Any, counts: list[int]) -> Any:
    engine = plait.prepare(Net(), strategy=strategy, loss_fn=weighted, device="cpu")
    data, start = pairs(10), sum(counts[:rank])
    return engine.evaluate(iter(data[start : start + counts[rank]]), metrics=[Accuracy()])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_evaluate_is_the_mean_over_all_ranks_however_many_micro_batches_each_has(
    four_ranks: RankPool, strategy: str
) -> None:
    model, data = Net(), pairs(10)
    terms = [weighted(model(x), (x, y)) for x, y in data]
    loss = float(torch.stack([term.sum for term in terms]).sum().detach() / sum(term.count for term in terms))
    hits = [bool(hit) for x, y in data for hit in model(x).argmax(-1) == y]
    for found in four_ranks.run(evaluate_unequally, strategy, COUNTS):
        assert found == pytest.approx({"loss": loss, "accuracy/top1": sum(hits) / len(hits)}, rel=1e-5)


def evaluate_nothing(rank: int, size: int, counts: list[int]) -> str:
    engine = plait.prepare(Net(), strategy="zero3", loss_fn=weighted, device="cpu")
    with pytest.raises(DataError) as caught:
        engine.evaluate(pairs(counts[rank]))
    return str(caught.value)


@pytest.mark.parametrize(("counts", "named"), [([2, 0], ["rank 1"]), ([0, 0], [])])
def test_a_rank_without_any_micro_batch_is_an_error_on_every_rank(
    two_ranks: RankPool, counts: list[int], named: list[str]
) -> None:
    for text in two_ranks.run(evaluate_nothing, counts):
        assert not missing(text, "batch", *named)
        assert ("rank" in text) == bool(named)


def evaluate_tokens(rank: int, size: int, strategy: Any) -> float:
    engine = engine_of(strategy)
    steps(engine, 0, 1)
    return engine.evaluate(mine(engine, TOKENS[1]))["loss"]


@pytest.mark.parametrize("strategy", [TP2, PP2], ids=["tp2", "pp2"])
def test_evaluate_counts_each_target_once_where_ranks_share_a_model(two_ranks: RankPool, strategy: Any) -> None:
    expected = evaluate_tokens(0, 1, "single")
    assert two_ranks.run(evaluate_tokens, strategy) == pytest.approx([expected] * 2, rel=1e-5)


# ---- what the model is called with


class Chain(nn.Module):
    """Of a form that a pipeline can split: see its page."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        h = hidden if self.inner is None else self.inner(x)
        assert h is not None
        for block in self.blocks:
            h = block(h).tanh()
        return h if self.head is None else self.head(h)


def as_mapping(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    x, y = batch
    return {"x": x, "y": y, "weight": 1.0 + y % 3}


def in_plain_torch(model: nn.Module, data: list[list[tuple[Tensor, Tensor]]]) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in data:
        terms = [weighted(model(x), (x, y)) for x, y in step]
        loss = torch.stack([term.sum for term in terms]).sum() / sum(term.count for term in terms)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [param.detach() for param in model.parameters()]


def with_fields(rank: int, size: int, strategy: Any, kind: str, words: Any, data: list[Any]) -> Any:
    model: Any = Chain() if kind == "chain" else Net()
    engine = plait.prepare(
        model, optim={"type": "SGD", "lr": 0.1}, strategy=strategy, loss_fn=weighted, device="cpu",
        accumulation=len(mine_of(data[0], strategy, rank, size)), **words,
    )  # fmt: skip
    losses = [engine.train_step(mine(engine, step)).loss for step in data]
    return losses, list(full_tensors(engine.state_tensors()).values())


def mine_of(step: list[Any], strategy: Any, rank: int, size: int) -> list[Any]:
    return step[rank::size] if isinstance(strategy, str) else step


TENSOR = {"layout": {"tp": 2}, "tensor": {"plan": {"layers.0": "colwise", "layers.2": "rowwise"}}}
LAYOUTS: list[Any] = ["ddp", "zero1", "zero2", "zero3", TENSOR]


@pytest.mark.parametrize("form", ["pair", "mapping"])
@pytest.mark.parametrize("named", [False, True], ids=["by signature", "by word"])
def test_a_model_of_x_alone_trains_on_batches_of_x_and_y(two_ranks: RankPool, form: str, named: bool) -> None:
    data: list[list[Any]] = [pairs(4, seed) for seed in range(3)]
    losses, params = in_plain_torch(Net(), data)
    words: dict[str, Any] = {}
    if named:
        words = {"model_inputs": 1 if form == "pair" else ("x",)}
    given = data if form == "pair" else [[as_mapping(batch) for batch in step] for step in data]
    runs = [with_fields(0, 1, "single", "net", words, given)]
    for strategy in LAYOUTS:
        runs += two_ranks.run(with_fields, strategy, "net", words, given)
    for found_losses, found in runs:
        assert found_losses == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(found[: len(params)], params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["pair", "mapping"])
def test_the_loss_of_a_pipeline_sees_the_whole_batch(two_ranks: RankPool, form: str) -> None:
    def same_size(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(3, 6, generator=generator), torch.randint(0, 4, (3,), generator=generator)) for _ in range(4)
        ]

    data = [same_size(seed) for seed in range(3)]
    losses, _ = in_plain_torch(Chain(), data)
    given = data if form == "pair" else [[as_mapping(batch) for batch in step] for step in data]
    for found, _ in two_ranks.run(with_fields, {"layout": {"pp": 2}}, "chain", {}, given):
        assert found == pytest.approx(losses, rel=1e-5)


class WithMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.linear(x if mask is None else x * mask)
        return out


class WithLabels(WithMask):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        return super().forward(x)


def test_an_optional_parameter_that_is_named_as_a_target_gets_it() -> None:
    batch = as_mapping(pairs(1)[0])
    assert engine_with(WithLabels()).train_step([(batch["x"], batch["y"])]).loss > 0


def engine_with(model: nn.Module, **words: Any) -> Engine:
    return plait.prepare(model, loss_fn=weighted, device="cpu", **words)


@pytest.mark.parametrize(
    ("model", "words", "change"),
    [
        (WithMask, {}, lambda batch: (batch["x"], batch["y"])),
        (Net, {}, lambda batch: {**batch, "attention_mask": torch.ones(2)}),
        (Net, {"model_inputs": 1}, lambda batch: batch),
        (Net, {"model_inputs": ("x",)}, lambda batch: (batch["x"], batch["y"])),
        (Net, {"model_inputs": ("image",)}, lambda batch: batch),
        (Net, {"model_inputs": 3}, lambda batch: (batch["x"], batch["y"])),
    ],
    ids=["may be the mask", "a mask left out", "a count of names", "names of a row", "no such name", "too many"],
)
def test_what_leaves_a_doubt_is_an_error_that_says_what_to_write(
    model: type[nn.Module], words: dict[str, Any], change: Callable[[Any], Any]
) -> None:
    batch = as_mapping(pairs(1)[0])
    with pytest.raises(ModelError, match="model_inputs"):
        engine_with(model(), **words).train_step([change(batch)])


@pytest.mark.parametrize("wrong", [0, "x", ()])
def test_a_word_that_names_no_field_is_an_error(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="model_inputs"):
        engine_with(Net(), model_inputs=wrong)


def test_the_runner_takes_the_word_too(tmp_path: Path) -> None:
    rows = [{"x": x[0], "y": y[0], "weight": 1.0} for x, y in pairs(8)]
    with Runner(
        Net(), rows, loss_fn=weighted, model_inputs=["x"], val_data=rows, work_dir=str(tmp_path), device="cpu",
        batch={"total": 4}, train={"max_steps": 2}, log={"console": "none", "sinks": []},
    ) as runner:  # fmt: skip
        runner.train()
        assert runner.step == 2
        assert runner.validate()["loss"] > 0


# ---- the page

PAGE = Path(__file__).parents[2] / "docs" / "engine-api.md"


def run_the_page(rank: int, size: int, folder: str) -> int:
    os.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), space)
    steps: int = space["engine"].steps
    return steps


def test_the_examples_of_the_page_run_on_two_ranks(tmp_path: Path) -> None:
    pool = RankPool(2)  # of its own: it changes the folder
    try:
        assert pool.run(run_the_page, str(tmp_path)) == [2, 2]
    finally:
        pool.close()


def test_the_page_names_all_that_an_engine_has() -> None:
    names = {name for name in (*vars(Engine), *Engine.__annotations__) if not name.startswith("_")}
    text = PAGE.read_text(encoding="utf-8")
    assert sorted(name for name in names if not re.search(rf"`{name}\b", text)) == []


def test_the_commands_read_what_it_saved(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    engine = engine_of("single")
    engine.save(tmp_path / "saved", extra={"best": 1.0})
    words_of = {"</s>": 0, **{f"w{i}": i for i in range(1, MODEL["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words_of, unk_token="w1"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for words, said in (
        (["convert", "--inspect", "saved"], "model.embedding.weight"),
        (["generate", "saved", "--tokenizer", "tokenizer.json", "--prompt", "w1 w2", "--tokens", "3"], "w"),
    ):
        command = [sys.executable, "-m", "plait", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
