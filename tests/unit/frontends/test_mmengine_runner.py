"""The runner on one process: loops, hooks, checkpoints, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from plait.checkpoint import open_checkpoint
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.frontends.mmengine import (
    METRICS,
    MODELS,
    RUNNERS,
    BaseMetric,
    BaseModel,
    Config,
    DefaultSampler,
    FlexibleRunner,
    Hook,
    Runner,
)


@MODELS.register_module()
class Tiny(BaseModel):
    """Two layers, with dropout where asked."""

    def __init__(self, dropout: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dropout = dropout
        self.hidden = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, labels: Tensor, mode: str = "tensor") -> Any:
        x = self.out(F.dropout(self.hidden(inputs).relu(), self.dropout, self.training))
        if mode == "loss":
            return {"loss_class": F.cross_entropy(x, labels), "loss_size": 0.1 * x.square().mean(), "top": x.max()}
        return list(zip(x, labels, strict=True)) if mode == "predict" else x


@METRICS.register_module()
class Hits(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(bool(x.argmax() == label) for x, label in data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"accuracy": sum(results) / len(results)}


class Note(Hook):
    """The order of everything, and the losses."""

    def __init__(self) -> None:
        self.points: list[str] = []
        self.losses: list[float] = []

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.losses.append(float(outputs["loss"].detach()))
        super().after_train_iter(runner, batch_idx, data_batch, outputs)

    def _before_epoch(self, runner: Any, mode: str = "train") -> None:
        self.points.append(f"{mode} epoch")

    def _after_iter(self, runner: Any, batch_idx: int, mode: str = "train", **_: Any) -> None:
        self.points.append(f"{mode} {batch_idx}")

    def after_train(self, runner: Any) -> None:
        self.points.append("end")


def points(count: int = 12, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def loader(count: int = 12, *, shuffle: bool = True, kind: str = "DefaultSampler") -> dict[str, Any]:
    sampler = {"type": kind, "shuffle": shuffle}
    return {"dataset": points(count), "sampler": sampler, "batch_size": 4, "collate_fn": {"type": "default_collate"}}


def settings(work_dir: Path, note: Note | None = None, **more: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "model": Tiny(dropout=0.3),
        "work_dir": str(work_dir),
        "train_dataloader": loader(),
        "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 0.05}},
        "train_cfg": {"by_epoch": True, "max_epochs": 2},
        "val_dataloader": loader(8, shuffle=False),
        "val_cfg": {},
        "val_evaluator": {"type": "Hits"},
        "custom_hooks": [] if note is None else [note],
        "randomness": {"seed": 1},
        **more,
    }


def test_hooks_are_called_in_the_order_of_mmengine(tmp_path: Path) -> None:
    note = Note()
    runner = Runner(**settings(tmp_path, note, train_cfg={"by_epoch": True, "max_epochs": 3, "val_interval": 2}))
    runner.train()
    epoch = ["train epoch", "train 0", "train 1", "train 2"]
    validation = ["val epoch", "val 0", "val 1"]
    assert note.points == [*epoch, *epoch, *validation, *epoch, *validation, "end"]
    assert (runner.epoch, runner.iter, runner.max_iters) == (3, 9, 9)
    assert [type(hook).__name__ for hook in runner.hooks] == [
        "RuntimeInfoHook",
        "IterTimerHook",
        "DistSamplerSeedHook",
        "Note",
        "LoggerHook",
        "ParamSchedulerHook",
        "CheckpointHook",
    ]
    assert runner.message_hub.get_scalar("train/loss_size").data[0][-1] > 0


def test_a_training_step_of_the_models_own_works_and_is_the_same(tmp_path: Path) -> None:
    class Own(Tiny):
        def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
            with optim_wrapper.optim_context(self):
                losses = self(*self.data_preprocessor(data, True), mode="loss")
            total = losses["loss_class"] + losses["loss_size"]
            optim_wrapper.update_params(total)
            return {"loss": total}

    usual, own = Note(), Note()
    Runner(**settings(tmp_path / "a", usual)).train()
    torch.manual_seed(3)
    Runner(**{**settings(tmp_path / "b", own), "model": _seeded(Own)}).train()
    assert own.losses == usual.losses


def _seeded(kind: type[Tiny]) -> Tiny:
    torch.manual_seed(3)
    return kind(dropout=0.3)


@pytest.mark.parametrize("way", ["by epoch", "in an epoch", "by iteration", "endless"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, way: str) -> None:
    cfg: dict[str, Any] = {"by_epoch": True, "max_epochs": 4}
    interval, by_epoch = 2, way == "by epoch"
    if way != "by epoch":
        interval = 5
    if way in ("by iteration", "endless"):
        cfg = {"by_epoch": False, "max_iters": 12, "val_interval": 3}
    more: dict[str, Any] = {
        "train_cfg": cfg,
        "train_dataloader": loader(kind="InfiniteSampler" if way == "endless" else "DefaultSampler"),
        "param_scheduler": {"type": "ExponentialLR", "gamma": 0.9, "by_epoch": by_epoch},
        "default_hooks": {"checkpoint": {"type": "CheckpointHook", "interval": interval, "by_epoch": by_epoch}},
    }
    whole, later = Note(), Note()
    Runner(**settings(tmp_path / "whole", whole, **more)).train()
    name = "epoch_2" if by_epoch else "iter_5"
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "last_checkpoint").write_text(str(tmp_path / "whole" / name))
    resumed = Runner(**settings(tmp_path / "later", later, resume=True, **more))
    resumed.train()
    done = 6 if by_epoch else 5
    assert later.losses == whole.losses[done:]
    assert resumed.iter == 12


@pytest.mark.parametrize("accumulation", ["the wrapper's", "DeepSpeed's"])
def test_gradients_are_accumulated_and_the_rest_of_a_run_is_a_step_too(tmp_path: Path, accumulation: str) -> None:
    steps: list[int] = []

    class Steps(Hook):
        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            steps.append(runner.engine.steps)

    wrapper: dict[str, Any] = {"optimizer": {"type": "SGD", "lr": 0.1}}
    if accumulation == "DeepSpeed's":  # which leaves the rest alone
        strategy = {"type": "DeepSpeedStrategy", "gradient_accumulation_steps": 4}
        FlexibleRunner(**settings(tmp_path, custom_hooks=[Steps()], optim_wrapper=wrapper, strategy=strategy)).train()
        assert steps == [0, 0, 0, 1, 1, 1]
        return
    wrapper |= {"accumulative_counts": 4, "clip_grad": {"max_norm": 1.0}}
    runner = Runner(**settings(tmp_path, custom_hooks=[Steps()], optim_wrapper=wrapper))
    runner.train()
    assert steps == [0, 0, 0, 1, 1, 2]
    assert len(runner.message_hub.get_scalar("train/grad_norm").data[0]) == 2


def test_a_compiled_model_trains_alike(tmp_path: Path) -> None:
    plain, compiled = Note(), Note()
    Runner(**settings(tmp_path / "a", plain)).train()
    Runner(**settings(tmp_path / "b", compiled, cfg={"compile": {"backend": "eager"}})).train()
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)


def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    hook = {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 2, "save_best": "auto"}
    runner = Runner(
        **settings(tmp_path, train_cfg={"by_epoch": True, "max_epochs": 5}, default_hooks={"checkpoint": hook})
    )
    runner.train()
    assert sorted(path.name for path in tmp_path.glob("epoch_*")) == ["epoch_4", "epoch_5"]
    (best,) = tmp_path.glob("best_accuracy_epoch_*")
    scores = runner.message_hub.get_scalar("val/accuracy").data[0]
    assert runner.message_hub.get_info("best_score") == max(scores)
    assert best.name == f"best_accuracy_epoch_{scores.index(max(scores)) + 1}"
    state = open_checkpoint(best).manifest.state
    assert (state["epoch"], state["step_in_epoch"]) == (scores.index(max(scores)) + 1, 0)


def test_a_run_that_goes_on_knows_the_best_of_the_validation_after_its_checkpoint(tmp_path: Path) -> None:
    def run(scores: list[float], epochs: int, **options: Any) -> Any:
        hook = {"type": "CheckpointHook", "interval": 1, "save_best": "accuracy"}
        given = settings(
            tmp_path,
            train_cfg={"by_epoch": True, "max_epochs": epochs},
            default_hooks={"checkpoint": hook},
            val_evaluator=Told(scores),
        )
        runner = Runner(**given, **options)
        runner.train()
        return runner

    def best() -> list[str]:
        return sorted(path.name for path in tmp_path.glob("best_accuracy_*"))

    run([10.0, 30.0], 2)
    assert best() == ["best_accuracy_epoch_2"]
    runner = run([20.0, 40.0], 4, resume=True)  # 20 is better than what the checkpoint of epoch 2 knows, and no best
    assert runner.message_hub.get_info("best_score") == 40.0
    assert best() == ["best_accuracy_epoch_4"]
    runner = run([5.0], 3, resume=True, load_from=str(tmp_path / "epoch_2"))  # what came later has not happened
    assert runner.message_hub.get_info("best_score") == 10.0


class Told(BaseMetric):
    """Says what it is told, validation by validation."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self._scores = list(scores)

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(0)

    def compute_metrics(self, results: Any) -> dict[str, float]:
        return {"accuracy": self._scores.pop(0)}


def test_weights_are_loaded_from_here_and_from_files_of_torch(tmp_path: Path) -> None:
    trained = Runner(**settings(tmp_path / "a"))
    trained.train()
    expected = trained.val()
    file = tmp_path / "weights.pth"
    torch.save({"meta": {"epoch": 2}, "state_dict": trained.model.state_dict()}, file)
    for source in (tmp_path / "a" / "epoch_2", tmp_path / "a" / "epoch_2.pth", tmp_path / "a", file):
        fresh = {
            key: value for key, value in settings(tmp_path / "b").items() if not key.startswith(("train", "optim"))
        }
        loaded = Runner(**fresh, load_from=str(source))
        assert loaded.val() == expected
        torch.testing.assert_close(loaded.model.state_dict(), trained.model.state_dict())
    with refused(CheckpointError, file, "plait convert", "load_from"):
        Runner(**settings(tmp_path / "c", load_from=str(file), resume=True)).train()
    with refused(CheckpointError, tmp_path / "gone", "work_dir"):
        Runner(**settings(tmp_path / "d", load_from=str(tmp_path / "gone"))).train()


def test_an_average_of_the_weights_is_validated_and_saved(tmp_path: Path) -> None:
    share = random.uniform(0.2, 0.8)
    seen: list[Tensor] = []

    class Watch(Hook):
        priority = "LOW"

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            seen.append(runner.model.out.weight.detach().clone())

        def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            validated.append(runner.model.out.weight.detach().clone())

    validated: list[Tensor] = []
    hooks = [{"type": "EMAHook", "momentum": share}, Watch()]
    runner = Runner(**settings(tmp_path, custom_hooks=hooks, train_cfg={"by_epoch": True, "max_epochs": 1}))
    runner.train()
    average = seen[0]
    for weight in seen[1:]:
        average = average + share * (weight - average)
    torch.testing.assert_close(validated[-1], average)
    torch.testing.assert_close(runner.model.out.weight.detach(), seen[-1])
    assert "hook.ema.out.weight" in open_checkpoint(tmp_path / "epoch_1").index.tensors


def test_training_stops_early_where_nothing_is_gained(tmp_path: Path) -> None:
    hook = {"type": "EarlyStoppingHook", "monitor": "accuracy", "patience": 2, "min_delta": 2.0}
    runner = Runner(**settings(tmp_path, custom_hooks=[hook], train_cfg={"by_epoch": True, "max_epochs": 9}))
    runner.train()
    assert runner.epoch == 3


def test_a_config_file_describes_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "model = dict(type='Tiny')\n"
        "optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16', optimizer=dict(type='SGD', lr=0.1))\n"
        "train_cfg = dict(type='EpochBasedTrainLoop', max_epochs=1)\n"
    )
    (tmp_path / "run.py").write_text(
        "_base_ = './base.py'\n"
        "data_root = 'anywhere'\n"
        "test_cfg = dict(fp16=False)\n"
        "test_evaluator = [dict(type='Hits', prefix='test')]\n"
        "visualizer = dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')])\n"
        "default_hooks = dict(logger=dict(type='LoggerHook', interval=1))\n"
        f"work_dir = {str(tmp_path / 'work')!r}\n"
    )
    config = Config.fromfile(tmp_path / "run.py")
    config.merge_from_dict({"train_cfg.max_epochs": 2})
    config.train_dataloader, config.test_dataloader = loader(), loader(shuffle=False)
    config.runner_type = "FlexibleRunner"
    runner = RUNNERS.build(config)
    runner.train()
    metrics = runner.test()
    assert runner.config.precision.compute == "bf16"
    assert 0 <= metrics["test/accuracy"] <= 1
    scalars = next((tmp_path / "work").glob("*/vis_data/scalars.json")).read_text().splitlines()
    assert [json.loads(line)["iter"] for line in scalars[:6]] == [1, 2, 3, 4, 5, 6]
    log = next((tmp_path / "work").glob("*/*.log")).read_text()
    assert re.search(r"Epoch\(train\) \[2\]\[3/3\]  lr: 1.0000e-01  eta: 0:00:00", log)
    assert re.search(r"Epoch\(test\) \[3/3\]    test/accuracy: \d\.\d{4}", log)
    config.strategy = {"type": "DDPStrategy"}
    with refused(ConfigError, "FlexibleRunner", key="strategy"):
        Runner.from_cfg(config)
    config.optim_wraper = {}
    with refused(ConfigError, "`optim_wrapper`", key="optim_wraper"):
        FlexibleRunner.from_cfg(config)


@pytest.mark.parametrize(
    ("change", "key", "names"),
    [
        ({"val_cfg": None}, "val_cfg", ["val_dataloader", "val_evaluator"]),
        ({"train_cfg": {"max_epochs": 1}}, "train_cfg.by_epoch", ["by_epoch=True", "max_epochs"]),
        (
            {"train_cfg": {"by_epoch": True, "max_epoch": 1}},
            "loop.EpochBasedTrainLoop.max_epoch",
            ["`max_epochs`"],
        ),
        ({"strategy": {"type": "DDPStrategi"}}, "strategy.type", ["'DDPStrategi'", "`DDPStrategy`"]),
        ({"default_hooks": {"loger": None}}, "default_hooks.loger", ["`logger`"]),
        ({"custom_hooks": [object()]}, "custom_hooks", ["object", "plait.frontends.mmengine.Hook"]),
        ({"randomness": {"sead": 1}}, "randomness.sead", ["`seed`"]),
        ({"strategi": {}}, "strategi", ["`strategy`"]),
        ({"default_scope": "mmdet"}, "default_scope", ["'mmdet'", "type='mmdet.Name'"]),
        ({"data_preprocessor": {}}, "data_preprocessor", ["model"]),
        (
            {"strategy": {"type": "DeepSpeedStrategy", "train_micro_batch_size_per_gpu": 3}},
            "strategy.train_micro_batch_size_per_gpu",
            [3, "`train_dataloader.batch_size` 4"],
        ),
        (
            {"param_scheduler": {"type": "LinearLR", "ends": 3}},
            "parameter scheduler.LinearLR.ends",
            ["`end`"],
        ),
        (
            {"visualizer": {"vis_backends": [{"type": "MLflowVisBackend"}]}},
            "vis_backends.type",
            ["'MLflowVisBackend'", "TensorboardVisBackend"],
        ),
    ],
)
def test_what_is_wrong_with_a_run_is_said(
    tmp_path: Path, change: dict[str, Any], key: str, names: list[object]
) -> None:
    with refused(ConfigError, *names, key=key):
        FlexibleRunner(**{**settings(tmp_path), **change}).train()


def test_a_model_without_steps_of_its_own_is_refused(tmp_path: Path) -> None:
    with refused(ModelError, "Linear", "train_step", "val_step", "BaseModel"):
        FlexibleRunner(**{**settings(tmp_path), "model": nn.Linear(1, 1)}).train()


def test_log_lines_of_iterations_count_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = {"by_epoch": False, "max_iters": 10, "val_interval": 10}
    hooks = {"logger": {"type": "LoggerHook", "interval": 5}}
    Runner(**settings(tmp_path, train_cfg=cfg, default_hooks=hooks, compile=False)).train()
    lines = [line.partition(" - INFO - ")[2] for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("Iter(train) [ 5/10]  lr: 5.0000e-02  eta: ") for line in lines)
    assert any(line.startswith("Iter(val) [2/2]    accuracy: ") for line in lines)


def test_a_loader_of_the_users_own_is_taken_as_it_is(tmp_path: Path) -> None:
    data = points()
    given = torch.utils.data.DataLoader(data, batch_size=3, sampler=DefaultSampler(data, seed=2))
    note = Note()
    runner = Runner(**settings(tmp_path, note, train_dataloader=given))
    runner.train()
    assert runner.train_dataloader is given
    assert len(note.losses) == 8
