"""Parts of one's own in real runs: by name, by object, by entry point; and what is refused at the start."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.multi.toys import Classifier, Points
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait import Runner
from plait.config.trust import entry_points_of
from plait.errors import ConfigError
from plait.monitor import Event, read_events
from plait.trainer import Hook, Metric

HERE = __name__


class Net(nn.Module):
    """Gives scores, and no loss."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, dim), nn.ReLU(), nn.Linear(dim, 4))

    def forward(self, x: Tensor, label: Tensor, number: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(x), "seen": number}


def points(count: int = 8) -> Points:
    return Points(count)


def collate(samples: Sequence[Mapping[str, Tensor]], shift: int = 0) -> dict[str, Tensor]:
    batch = {key: torch.stack([each[key] for each in samples]) for key in samples[0]}
    return {**batch, "number": batch["number"] + shift}


def loss(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor], smoothing: float = 0.0) -> Tensor:
    return nn.functional.cross_entropy(outputs["logits"], batch["label"], label_smoothing=smoothing)


class Loss:
    """The same as an object."""

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        return loss(outputs, batch, self.smoothing)


class Losses(Hook):
    made: list[Losses]

    def __init__(self, label: str = "") -> None:
        self.label, self.losses = label, []
        LOSSES.append(self)

    losses: list[float]

    def after_step(self, runner: Runner, result: Any) -> None:
        self.losses.append(result.loss)


LOSSES: list[Losses] = []


class Highest(Metric):
    def __init__(self, plus: int = 0) -> None:
        self.plus = plus

    def measure(self, outputs: Any, inputs: Any) -> Sequence[int]:
        return [int(each) + self.plus for each in outputs["seen"]]

    def summarize(self, records: Sequence[int]) -> Mapping[str, float]:
        return {"highest": float(max(records))}


class Kinds:
    """A log sink: the kinds of the events, in a file of its own."""

    def __init__(self, work_dir: Path, name: str = "kinds.txt") -> None:
        self.path, self.steps = work_dir / name, 0

    def write(self, event: Event) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{event.kind.value}\n")

    def tick(self, step: int) -> None:
        self.steps = step

    def close(self) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"closed after {self.steps}\n")


class Failing(Kinds):
    def write(self, event: Event) -> None:
        raise OSError("the disk is gone")


def make(work_dir: Path, **sections: Any) -> Runner:
    settings: dict[str, Any] = {
        "model": {"type": f"{HERE}:Net", "dim": 16},
        "data": {"type": f"{HERE}:points", "count": 8, "shuffle": False},
        "train": {"max_steps": 3, "loss": f"{HERE}:loss"},
        "batch": {"total": 4},
        "optim": {"type": "SGD", "lr": 0.1},
        "log": {"console": "none", "sinks": []},
        "device": "cpu",
        "work_dir": work_dir,
    }
    return Runner(**{**settings, **sections})


def losses_of(runner: Runner) -> list[float]:
    with runner:
        runner.train()
    return LOSSES[-1].losses


@pytest.fixture(autouse=True)
def nothing_heard() -> None:
    LOSSES.clear()


def test_a_run_of_parts_by_name_learns_what_the_same_objects_learn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    named = losses_of(make(tmp_path / "named", hooks=[f"{HERE}:Losses"]))

    def net() -> Net:
        return Net(16)

    given = losses_of(
        make(
            tmp_path / "given",
            model=net,
            data={"type": Points(8), "shuffle": False},
            train={"max_steps": 3},
            loss_fn=loss,
            hooks=[Losses()],
        )
    )
    assert named == given
    assert len(set(named)) == 3


def test_a_class_is_a_part_with_arguments(tmp_path: Path) -> None:
    one = make(
        tmp_path / "one",
        model={"type": Net, "dim": 16},
        data={"type": Points, "count": 8, "shuffle": False},
        train={"max_steps": 2, "loss": {"type": Loss, "smoothing": 0.5}},
        hooks=[{"type": Losses, "label": "mine", "priority": 7}],
    )
    assert one.config.model.type == f"{HERE}:Net"  # type: ignore[union-attr]
    found = losses_of(one)
    assert (LOSSES[-1].label, LOSSES[-1].priority) == ("mine", 7)
    two = {"max_steps": 2, "loss": {"type": f"{HERE}:loss", "smoothing": 0.5}}
    assert found == losses_of(make(tmp_path / "two", train=two, hooks=[Losses]))
    plain = {"max_steps": 2, "loss": f"{HERE}:loss"}
    assert found != losses_of(make(tmp_path / "three", train=plain, hooks=[Losses]))


def test_what_a_run_left_can_be_read_and_run_again(tmp_path: Path) -> None:
    first = losses_of(make(tmp_path / "run", hooks=[f"{HERE}:Losses"], metrics=["accuracy"]))
    (tmp_path / "run" / "config.yaml").rename(tmp_path / "again.yaml")
    again = Runner.from_config(tmp_path / "again.yaml", [f"work_dir={tmp_path / 'again'}", "model.dim=16"])
    assert first == losses_of(again)


def test_the_older_form_makes_the_same_parts(tmp_path: Path) -> None:
    def old(name: str, **args: Any) -> dict[str, Any]:
        return {"type": "import", "target": f"{HERE}:{name}", "args": args}

    new = losses_of(make(tmp_path / "new", hooks=[f"{HERE}:Losses"]))
    data = {**old("points", count=8), "shuffle": False}
    assert new == losses_of(make(tmp_path / "old", model=old("Net", dim=16), data=data, hooks=[old("Losses")]))


def test_metrics_and_collate_of_ones_own_measure_each_sample_once(tmp_path: Path) -> None:
    runner = make(
        tmp_path,
        val_data={"type": f"{HERE}:points", "count": 7, "collate": {"type": f"{HERE}:collate", "shift": 100}},
        metrics=[{"type": f"{HERE}:Highest", "plus": 1}, "accuracy", {"type": "accuracy", "prefix": "hits", "top": 4}],
    )
    with runner:
        found = runner.validate()
    assert found["highest"] == 107
    assert set(found) == {"loss", "highest", "accuracy/top1", "hits/top4"}
    assert found["hits/top4"] == 1.0


def test_a_mixture_has_sources_of_ones_own(tmp_path: Path) -> None:
    sources = [f"{HERE}:points", {"type": f"{HERE}:points", "count": 4}]
    data = {"type": "mixture", "sources": sources, "collate": collate}
    with make(tmp_path, data=data) as runner:
        runner.train()
        assert runner.steps_per_epoch == 3


def test_sinks_of_ones_own_hear_every_event_and_cannot_end_a_run(tmp_path: Path) -> None:
    given = Kinds(tmp_path, "given.txt")
    sinks = ["jsonl", f"{HERE}:Failing", {"type": f"{HERE}:Kinds", "name": "named.txt"}, given]
    with make(tmp_path, log={"console": "none", "sinks": sinks, "every": 1}) as runner:
        runner.train()
    heard = (tmp_path / "named.txt").read_text(encoding="utf-8").split("\n")
    assert "run_start" in heard
    assert heard.count("train") == 3
    assert heard[-2] == "closed after 3"
    assert heard == given.path.read_text(encoding="utf-8").split("\n")
    record = read_events([tmp_path / "events-rank0.jsonl"])
    assert any("the disk is gone" in each.data.get("text", "") for each in record)


def test_a_module_and_a_dataloader_in_a_section_are_those_objects(tmp_path: Path) -> None:
    module = Classifier()
    runner = Runner.from_config(
        {
            "model": module,
            "data": DataLoader(Points(8), batch_size=4),
            "train": {"max_steps": 1},
            "log": {"console": "none", "sinks": []},
            "device": "cpu",
            "work_dir": str(tmp_path),
        }
    )
    before = module.out.weight.detach().clone()
    with runner:
        runner.train()
    assert not torch.equal(before, module.out.weight)


class NoHook:
    pass


class NoSink:
    def __init__(self, work_dir: Path) -> None:
        pass

    def write(self, event: Event) -> None:
        """Hear nothing."""


def one_argument(outputs: Any) -> Any:
    return outputs


def needs_more(outputs: Any, batch: Any, weight: float) -> Any:
    return weight


def loader() -> DataLoader[Any]:
    return DataLoader(Points(8))


@pytest.mark.parametrize(
    ("sections", "path", "said"),
    [
        ({"hooks": [f"{HERE}:NoHook"]}, "hooks.0.type", "Hook"),
        ({"hooks": [{"type": "import", "target": f"{HERE}:NoHook"}]}, "hooks.0.target", "Hook"),
        ({"hooks": [{"type": f"{HERE}:Losses", "lable": "x"}]}, "hooks.0.lable", "label"),
        ({"metrics": [f"{HERE}:NoHook"]}, "metrics.0.type", "Metric"),
        ({"metrics": ["acuracy"]}, "metrics.0", "accuracy"),
        ({"model": f"{HERE}:NoHook"}, "model.type", "Module"),
        ({"model": {"type": f"{HERE}:Net", "dimm": 3}}, "model.dimm", "dim"),
        ({"data": f"{HERE}:NoHook"}, "data.type", "__getitem__"),
        ({"data": f"{HERE}:loader"}, "data.type", "DataLoader"),
        ({"data": {"type": f"{HERE}:points", "collate": f"{HERE}:Points"}}, "data.collate", "count"),
        ({"data": {"type": f"{HERE}:points", "collate": {"type": f"{HERE}:collate", "x": 1}}}, "data.collate.x", "x"),
        ({"log": {"console": "none", "sinks": [f"{HERE}:NoSink"]}}, "log.sinks.0.type", "close"),
        ({"log": {"console": "none", "sinks": ["cvs"]}}, "log.sinks.0", "csv"),
        ({"train": {"max_steps": 1, "loss": f"{HERE}:one_argument"}}, "train.loss", "outputs, batch"),
        ({"train": {"max_steps": 1, "loss": f"{HERE}:needs_more"}}, "train.loss", "train.loss.weight"),
        ({"train": {"max_steps": 1, "loss": f"{HERE}:HERE"}}, "train.loss.type", "outputs, batch"),
        ({"train": {"max_steps": 1, "loss": f"{HERE}:loss"}, "loss_fn": loss}, "train.loss", "loss_fn"),
        ({"data": {"type": f"{HERE}:points", "collate": collate}, "collate_fn": collate}, "data.collate", "collate_fn"),
    ],
)
def test_what_is_no_such_part_is_refused_before_the_first_step(
    tmp_path: Path, sections: dict[str, Any], path: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, **sections).train()
    problem = caught.value.problems[0]
    assert problem.path == path
    assert said in f"{problem.message} {problem.remedy}"


CODE = f"from {HERE} import Highest, Kinds, Losses, Net, collate, loss, points\n"
POINTS = {
    "model": "net = brings_parts:Net",
    "data": "points = brings_parts:points",
    "collate": "stacked = brings_parts:collate",
    "loss": "entropy = brings_parts:loss",
    "hook": "losses = brings_parts:Losses",
    "metric": "highest = brings_parts:Highest",
    "sink": "kinds = brings_parts:Kinds",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    info = tmp_path / "site" / "brings_parts-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brings_parts\nVersion: 1.0\n")
    groups = "".join(f"[plait.{kind}]\n{line}\n" for kind, line in POINTS.items())
    (info / "entry_points.txt").write_text(groups)
    (info.parent / "brings_parts.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(info.parent))
    entry_points_of.cache_clear()
    yield
    entry_points_of.cache_clear()
    sys.modules.pop("brings_parts", None)


@pytest.mark.usefixtures("package")
def test_an_installed_package_brings_every_kind(tmp_path: Path) -> None:
    runner = make(
        tmp_path / "run",
        model={"type": "net", "dim": 16},
        data={"type": "points", "count": 8, "shuffle": False, "collate": "stacked"},
        val_data="points",
        train={"max_steps": 3, "loss": "entropy"},
        hooks=["losses"],
        metrics=["highest"],
        log={"console": "none", "sinks": ["kinds"]},
    )
    found = losses_of(runner)
    assert found == losses_of(make(tmp_path / "plain", hooks=[f"{HERE}:Losses"]))
    assert (tmp_path / "run" / "kinds.txt").exists()
