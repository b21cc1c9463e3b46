"""The Runner as a user meets it, in one process."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from tests.multi.toys import Classifier, Points, Trace, fit
from tests.refusals import refused
from torch.utils.data import DataLoader, IterableDataset

from plait import Runner
from plait.errors import CheckpointError, ConfigError, DataError, ModelError, TrainingError
from plait.monitor import EventKind, read_events
from plait.trainer import Accuracy

QUIET = {"console": "none", "sinks": []}


def make(tmp_path: Path, **sections: Any) -> Runner:
    settings: dict[str, Any] = {
        "model": Classifier(),
        "data": Points(10),
        "train": {"max_steps": 3},
        "batch": {"total": 4},
        "work_dir": tmp_path / "run",
        "log": QUIET,
        "device": "cpu",
    }
    return Runner(**{**settings, **sections})


def events(tmp_path: Path, kind: EventKind) -> list[Any]:
    return [event for event in read_events([tmp_path / "run" / "events-rank0.jsonl"]) if event.kind is kind]


def test_train_validate_and_test_as_the_documentation_shows(tmp_path: Path) -> None:
    runner = Runner(
        model=Classifier(),
        data=Points(32),
        optim={"type": "AdamW", "lr": 1e-2},
        schedule={"type": "LinearLR", "start_factor": 0.5, "end_factor": 0.1},
        strategy={"zero": 3},
        precision="bf16",
        train={"by_epoch": True, "max_epochs": 2, "val_every": 1},
        val_data=Points(9, seed=1),
        metrics=[Accuracy()],
        work_dir=tmp_path / "run",
        batch={"micro": 8},
        device="cpu",
    )
    with runner:
        runner.train()
        found, tested = runner.validate(), runner.test()
    assert runner.step == 8
    assert found == tested  # without test_data the validation data are tested on
    assert set(found) == {"loss", "accuracy/top1"}
    assert len(events(tmp_path, EventKind.VALIDATE)) == 3
    assert len(events(tmp_path, EventKind.TEST)) == 1


def test_a_runner_has_its_parts_after_setup_and_not_before(tmp_path: Path) -> None:
    made: list[Classifier] = []

    def build() -> Classifier:
        made.append(Classifier())
        return made[-1]

    runner = make(tmp_path, model=build, strategy={"meta_init": False})
    for part in ("world", "engine", "step"):
        with refused(TrainingError, part, "runner.setup"):
            getattr(runner, part)
    assert made == []
    assert not (tmp_path / "run").exists()
    runner.setup()
    engine = runner.engine
    assert (runner.step, runner.world.size, runner.batch.total, len(made)) == (0, 1, 4, 1)
    runner.setup()
    runner.train()
    assert runner.engine is engine
    assert (runner.step, len(made)) == (3, 1)
    runner.close()
    with pytest.raises(TrainingError, match="closed"):
        runner.setup()


def test_setup_resumes(tmp_path: Path) -> None:
    make(tmp_path).train()
    again = make(tmp_path, checkpoint={"resume": "auto"})
    again.setup()
    assert (again.step, again.epoch, again.step_in_epoch) == (3, 1, 0)


def test_what_is_wrong_with_the_data_shows_before_a_model_is_built(tmp_path: Path) -> None:
    def build() -> Classifier:
        raise AssertionError("built")

    data = {"type": "tokens", "path": str(tmp_path / "absent"), "seq_len": 8}
    with pytest.raises(DataError, match="absent"):
        make(tmp_path, model=build, data=data).setup()


def test_a_folder_that_holds_a_run_is_refused_before_its_log_is_written_to(tmp_path: Path) -> None:
    make(tmp_path, log={"console": "none"}).train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with refused(CheckpointError, tmp_path / "run", "step-00000003", "checkpoint.resume=auto"):
        make(tmp_path, log={"console": "none"}).train()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_dataloader_trains_like_the_data_set_in_it(tmp_path: Path) -> None:
    data, ends = Points(12), []
    for given, batch in ((data, {"micro": 4}), (DataLoader(data, batch_size=4, shuffle=True), {})):
        runner = make(tmp_path, data=given, batch=batch, work_dir=tmp_path / type(given).__name__)
        runner.train()
        ends.append(runner.engine.model.state_dict())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_loss_function_may_be_given_beside_a_plain_model(tmp_path: Path) -> None:
    pairs = [(torch.randn(8), torch.tensor(i % 4)) for i in range(8)]

    def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch[1])

    class Plain(torch.nn.Linear):
        def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    runner = make(tmp_path, model=Plain(8, 4), data=pairs, loss_fn=loss, val_data=pairs, metrics=[Accuracy()])
    runner.train()
    assert runner.step == 3
    assert 0.0 <= runner.validate()["accuracy/top1"] <= 1.0


def test_a_function_that_makes_the_model_is_called_by_the_runner(tmp_path: Path) -> None:
    runner = make(tmp_path, model=Classifier)
    runner.train()
    assert isinstance(runner.engine.model, Classifier)


def test_a_run_description_with_overrides(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"{random.random()} is a number\n" for _ in range(60)))
    text = {"type": "text", "path": str(corpus), "vocab_size": 270, "seq_len": 8, "cache": str(tmp_path / "cache")}
    description = {
        "work_dir": str(tmp_path / "run"),
        "device": "cpu",
        "model": {"type": "llama", "vocab_size": 300, "dim": 16, "layers": 1, "heads": 2, "seq_len": 8},
        "data": text,
        "batch": {"total": 2},
        "train": {"max_steps": 50},
        "log": {"every": 1, "console": "none"},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(description))
    with Runner.from_config(path, ["train.max_steps=2", "optim.lr=3e-4"], hooks=[trace := Trace()]) as runner:
        runner.train()
    assert trace.rates == [3e-4, 3e-4]
    assert [event.step for event in events(tmp_path, EventKind.TRAIN)] == [1, 2]
    again = Runner.from_config(tmp_path / "run" / "config.yaml")
    assert again.config == runner.config


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        ({"model": None}, "model", "type"),
        ({"model": {"layers": 3}}, "model", "dict"),
        ({"data": None}, "data", "`data`"),
        ({"train": {}}, "train", "train.max_steps"),
        ({"optin": {"lr": 1.0}}, "optin", "optim"),
        ({"train": {"max_steps": 2, "val_every": 1}}, "train.val_every", "`val_data`"),
        ({"hooks": [{"type": "import", "target": "no_such_module:Hook"}]}, "hooks.0.target", "no_such_module"),
        ({"hooks": [{"type": "import", "target": "pathlib:Path"}]}, "hooks.0.target", "Hook"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, sections: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **sections).train()
    (problem,) = caught.value.problems
    assert problem.path == path
    assert words in str(problem)


def test_measuring_without_data_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="val_data"):
        make(tmp_path).validate()


def test_an_accuracy_without_logits_says_what_it_needs(tmp_path: Path) -> None:
    runner = make(tmp_path, val_data=Points(4), metrics=[Accuracy(logits="scores")])
    with pytest.raises(ModelError, match="'scores'"):
        runner.validate()


def test_accuracy_is_the_share_of_samples_among_the_most_likely() -> None:
    logits = torch.randn(50, 7)
    label = torch.randint(0, 7, (50,))
    for top in (1, 3):
        metric = Accuracy(top=top)
        ranks = logits.argsort(descending=True)[:, :top]
        expected = sum(int(label[i]) in ranks[i].tolist() for i in range(50)) / 50
        halves = [
            *metric.measure(logits[:20], (None, label[:20])),
            *metric.measure({"logits": logits[20:]}, {"label": label[20:]}),
        ]
        assert metric.summarize(halves) == {f"accuracy/top{top}": pytest.approx(expected)}


def test_a_work_dir_that_holds_a_run_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    make(tmp_path).train()
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))}
    with refused(CheckpointError, tmp_path / "run", "step-00000003", "checkpoint.resume=auto"):
        make(tmp_path, train={"max_steps": 9}).train()
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*"))} == before


def test_a_work_dir_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(ConfigError, "file/run", key="work_dir"):
        make(tmp_path, work_dir=tmp_path / "file" / "run").train()


def test_training_again_in_the_same_runner_goes_on(tmp_path: Path) -> None:
    runner = make(tmp_path, train={"max_steps": 5}, hooks=[stop := StopOnce(2)])
    runner.train()
    assert (runner.step, runner.stop_reason) == (2, "enough")
    runner.train()
    assert (runner.step, runner.stop_reason) == (5, None)
    assert stop.asked == 1


class StopOnce(Trace):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.asked = step, 0

    def before_step(self, runner: Runner) -> None:
        if runner.step == self.step - 1 and not self.asked:
            self.asked += 1
            runner.stop("enough")


def test_a_closed_runner_measures_nothing(tmp_path: Path) -> None:
    with make(tmp_path, val_data=Points(4)) as runner:
        runner.train()
    for again in (runner.train, runner.validate, runner.test):
        with pytest.raises(TrainingError, match="closed"):
            again()
    assert runner.step == 3


def test_events_count_epochs_from_one_and_steps_from_where_the_run_resumed(tmp_path: Path) -> None:
    settings = {"log": {"console": "none", "every": 1}, "val_data": Points(3), "train": {"max_epochs": 2}}
    make(tmp_path, **settings).train()
    assert [event.epoch for event in events(tmp_path, EventKind.TRAIN)] == [1, 1, 1, 2, 2, 2]
    assert [event.epoch for event in events(tmp_path, EventKind.VALIDATE)] == [1, 2]
    (start,) = events(tmp_path, EventKind.RUN_START)
    assert (start.step, start.data["max_steps"]) == (0, 6)
    assert [event.data["reason"] for event in events(tmp_path, EventKind.RUN_END)] == ["finished"]
    make(tmp_path, **{**settings, "train": {"max_epochs": 3}, "checkpoint": {"resume": "auto"}}).train()
    again = events(tmp_path, EventKind.RUN_START)[-1]
    assert (again.step, again.data["max_steps"]) == (6, 9)
    assert [event.epoch for event in events(tmp_path, EventKind.VALIDATE)] == [1, 2, 3]


def test_a_runner_that_nobody_closes_lets_its_record_go(tmp_path: Path) -> None:
    def held() -> list[str]:
        return [
            Path(each.path).name for each in psutil.Process().open_files() if Path(each.path).is_relative_to(tmp_path)
        ]

    runner = make(tmp_path, log={"console": "none"})
    runner.train()
    assert held() == ["events-rank0.jsonl"]
    del runner
    gc.collect()
    assert held() == []


def test_a_validation_by_steps_tells_the_running_epoch(tmp_path: Path) -> None:
    train = {"max_steps": 7, "val_every": 2}
    make(tmp_path, train=train, val_data=Points(3), log={"console": "none"}).train()
    found = [(event.step, event.epoch) for event in events(tmp_path, EventKind.VALIDATE)]
    assert found == [(2, 1), (4, 2), (6, 2)]


def test_counting_steps_validates_at_the_end_unless_told_otherwise(tmp_path: Path) -> None:
    make(tmp_path, train={"max_steps": 7}, val_data=Points(3), log={"console": "none"}).train()
    assert [event.step for event in events(tmp_path, EventKind.VALIDATE)] == [7]


def test_a_run_that_fails_says_so_in_its_record(tmp_path: Path) -> None:
    class Broken(Points):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            raise RuntimeError("broken on purpose")

    with pytest.raises(RuntimeError, match="broken on purpose"):
        make(tmp_path, data=Broken(8), log={"console": "none"}).train()
    (reason,) = [event.data["reason"] for event in events(tmp_path, EventKind.RUN_END)]
    assert "RuntimeError" in reason


def test_validation_data_that_are_not_there_show_before_training(tmp_path: Path) -> None:
    runner = make(tmp_path, val_data={"type": "cifar10", "path": str(tmp_path), "split": "test"})
    with pytest.raises(DataError, match="CIFAR-10"):
        runner.train()
    assert runner.step == 0


def test_at_most_val_batches_are_measured_in_a_validation_but_all_in_a_test(tmp_path: Path) -> None:
    outcome = fit(0, 1, {"work_dir": tmp_path / "a", "train": {"max_epochs": 1, "val_batches": 2}}, validation=11)
    assert outcome.metrics[0]["samples"] == 8
    runner = make(tmp_path, val_data=Points(11), train={"max_steps": 1, "val_batches": 1}, metrics=[Accuracy()])
    runner.train()
    assert runner.test()["loss"] != runner.validate()["loss"]


class Numbers(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.points = Points(count)

    def __iter__(self) -> Any:
        return (self.points[i] for i in range(len(self.points)))


def test_a_stream_is_read_on_where_a_checkpoint_left_it(tmp_path: Path) -> None:
    stop, resumed = Trace(), Trace()
    settings = {"data": Numbers(20), "batch": {"total": 4}}
    make(tmp_path, **settings, train={"max_steps": 2}, hooks=[stop]).train()
    make(tmp_path, **settings, train={"max_steps": 6}, hooks=[resumed], checkpoint={"resume": "auto"}).train()
    assert stop.numbers + resumed.numbers == [*range(20), *range(4)]


def test_a_stream_that_is_spent_is_not_measured_as_nothing(tmp_path: Path) -> None:
    points = Points(4)
    runner = make(tmp_path, val_data=(points[i] for i in range(4)))
    runner.validate()
    with refused(DataError, "generator", "__iter__"):
        runner.validate()


def test_a_vocabulary_larger_than_the_models_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{random.random()} and more\n" for _ in range(200)))
    data = {"type": "text", "path": str(tmp_path / "text.txt"), "seq_len": 8, "cache": str(tmp_path / "cache")}
    small = Runner(model=Classifier(), data={**data, "vocab_size": 280}, work_dir=tmp_path / "a", log=QUIET)
    small.setup()
    size = small.loader.dataset.vocab_size
    tokenizer = next((tmp_path / "cache").rglob("tokenizer.json"))
    model = {"type": "gpt", "vocab_size": size - 1, "dim": 8, "layers": 1, "heads": 1, "seq_len": 8}
    with refused(ConfigError, size - 1, size, key="model.vocab_size"):
        make(tmp_path, model=model, data={**data, "tokenizer": str(tokenizer)}).train()


def test_validation_text_is_cut_by_the_training_tokenizer(tmp_path: Path) -> None:
    sources = {}
    for name in ("data", "val_data"):
        path = tmp_path / f"{name}.txt"
        path.write_text("".join(f"{random.random()} {name}\n" for _ in range(80)))
        sources[name] = {
            "type": "text",
            "path": str(path),
            "seq_len": 8,
            "vocab_size": 300,
            "cache": str(tmp_path / "cache"),
        }
    model = {"type": "gpt", "vocab_size": 300, "dim": 8, "layers": 1, "heads": 1, "seq_len": 8}
    runner = make(tmp_path, model=model, **sources)
    runner.train()
    runner.validate()
    tokens = [loader.dataset.tokens.meta.tokenizer for loader in (runner.loader, runner.eval_loader("val_data"))]
    assert tokens[0] == tokens[1]
    with refused(ConfigError, key="val_data.tokenizer"):
        make(tmp_path, model=model, val_data=sources["val_data"], work_dir=tmp_path / "other").validate()


@pytest.mark.parametrize(
    ("strategy", "level", "words"),
    [({"recompute": "auto"}, "info", "recompute: auto"), ({"graphs": True}, "warning", "CUDA")],
    ids=["good to know", "to be looked at"],
)
def test_what_an_engine_says_is_a_warning_unless_it_is_a_note(
    tmp_path: Path, strategy: dict[str, Any], level: str, words: str
) -> None:
    llama = {"type": "llama", "vocab_size": 32, "dim": 16, "layers": 2, "heads": 2, "seq_len": 8}
    ids = [{"input_ids": torch.randint(32, (8,)), "labels": torch.randint(32, (8,))} for _ in range(8)]
    make(tmp_path, model=llama, data=ids, strategy=strategy, log={"console": "none"}).train()
    found = [event.data for event in events(tmp_path, EventKind.MESSAGE) if words in event.data["text"]]
    assert [one["level"] for one in found] == [level]


@pytest.mark.planned
def test_what_takes_a_while_before_the_first_table_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for console in ("plain", "none"):
        with make(tmp_path, work_dir=tmp_path / console, log={"console": console}) as runner:
            runner.train()
        head = capsys.readouterr().out.partition(" · ")[0].splitlines()
        if console == "none":
            assert head == []
        else:
            plan, data, model, _ = head
            assert "plan" in plan
            assert "data" in data
            assert "model" in model
