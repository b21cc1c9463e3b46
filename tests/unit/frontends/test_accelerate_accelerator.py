"""An `Accelerator` with one process: what it is told, what it says, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from plait.errors import CheckpointError, ConfigError, ModelError, TrainingError
from plait.frontends.accelerate import (
    Accelerator,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
)
from plait.frontends.accelerate.state_files import pack, unpack
from plait.frontends.accelerate.utils import (
    DistributedDataParallelKwargs,
    DummyOptim,
    DummyScheduler,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    TorchDynamoPlugin,
    set_seed,
)
from plait.monitor import read_events


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_plugins_say_what_a_file_would() -> None:
    from torch.distributed.fsdp import CPUOffload, MixedPrecisionPolicy, ShardingStrategy

    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=False),
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    config = Accelerator(cpu=True, fsdp_plugin=plugin).config
    assert config.strategy.stage == 2
    assert config.strategy.wrap.classes == ("Linear",)
    assert (config.precision.compute, config.precision.reduce) == ("bf16", "fp32")

    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=3, gradient_clipping=0.5)
    )
    assert accelerator.config.strategy.stage == 1
    assert accelerator.config.train.clip_norm == 0.5
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.key_report.entries

    from datetime import timedelta

    handlers = [
        DistributedDataParallelKwargs(bucket_cap_mb=10),
        InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
        GradScalerKwargs(init_scale=2.0**10, growth_interval=50),
    ]
    config = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers).config
    assert (config.strategy.bucket_mb, config.timeout_s) == (10.0, 77.0)
    assert (config.precision.scaler.initial_power, config.precision.scaler.window) == (10, 50)
    compiled = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="eager")).config
    assert compiled.strategy.compile.backend == "eager"
    assert Accelerator(cpu=True, sections={"strategy": "zero3"}).config.strategy.stage == 3


@pytest.mark.parametrize(
    ("options", "key", "names"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision", ["'fp8'", "bf16"]),
        ({"mixed_precision": "b16"}, "mixed_precision", ["'b16'", "`bf16`"]),
        (
            {"kwargs_handlers": [GradScalerKwargs(growth_factor=3.0)], "mixed_precision": "fp16"},
            "GradScalerKwargs.growth_factor",
            [3.0, 2.0],
        ),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "strategy.layout.cp", ["plait train", "Runner"]),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(2)},
            "gradient_accumulation_steps",
            ["gradient_accumulation_plugin", "num_steps"],
        ),
        ({"log_with": "mlflow"}, "log_with", ["'mlflow'", "tensorboard"]),
        (
            {"gradient_accumulation_steps": 2, "deepspeed_plugin": DeepSpeedPlugin(gradient_accumulation_steps=4)},
            "gradient_accumulation_steps",
            [2, 4, "DeepSpeed"],
        ),
        (
            {"mixed_precision": "fp16", "deepspeed_plugin": DeepSpeedPlugin({"bf16": {"enabled": True}})},
            "mixed_precision",
            ["fp16", "bf16"],
        ),
        (
            {"mixed_precision": "bf16", "deepspeed_plugin": DeepSpeedPlugin({"bf16": {"enabled": False}})},
            "mixed_precision",
            ["bf16", "`bf16.enabled`", "'auto'"],
        ),
        (
            {"mixed_precision": "bf16", "deepspeed_plugin": DeepSpeedPlugin({"bf16": {}})},
            "mixed_precision",
            ["bf16", "`bf16.enabled`", "'auto'"],
        ),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", [0]),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps", [-1]),
        ({"gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps", [2.5]),
    ],
)
def test_what_it_cannot_do_is_an_error_with_a_remedy(options: dict[str, Any], key: str, names: list[object]) -> None:
    with refused(ConfigError, *names, key=key):
        Accelerator(cpu=True, **options)


DESCRIBED = {
    "optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": 0.5, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
            "total_num_steps": "auto",
        },
    },
    "gradient_clipping": 0,
}


def test_a_deepspeed_configuration_makes_what_stands_ins_stand_for(tmp_path: Path) -> None:
    file, yaml = tmp_path / "ds.json", tmp_path / "accelerate.yaml"
    file.write_text(json.dumps(DESCRIBED))
    yaml.write_text(
        f"distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config: {{deepspeed_config_file: {file}}}\n"
    )
    accelerator = Accelerator(config_file=yaml)
    assert "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config  # as scripts ask, to choose
    model, _ = small()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.0}]
    optimizer = DummyOptim(groups, lr=0.25, weight_decay=0.5)
    scheduler = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=2)
    scheduler, optimizer, prepared = accelerator.prepare(scheduler, optimizer, model)
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert [(group["momentum"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.5), (0.5, 0.0)]
    rates = []
    for _ in range(6):
        accelerator.backward(prepared(torch.ones(2, 3)).square().mean())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert rates == pytest.approx([0.0, 0.0, 0.125, 0.25, 0.1875, 0.125])
    accelerator.save_state(tmp_path / "state")
    scheduler.step()
    accelerator.load_state(tmp_path / "state")
    assert scheduler.get_last_lr() == pytest.approx([0.0625, 0.0625])


def test_an_optimizer_is_described_or_made_and_not_both() -> None:
    model, optimizer = small()
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(DESCRIBED))
    with refused(ConfigError, "DummyOptim", "plait.frontends.accelerate.utils", key="deepspeed_config: optimizer"):
        accelerator.prepare(model, optimizer)
    made = accelerator.prepare(DummyOptim(model.parameters(), lr=0.5))
    with refused(ConfigError, "DummyScheduler", "plait.frontends.accelerate.utils", key="deepspeed_config: scheduler"):
        accelerator.prepare(StepLR(made.optimizer, 1))
    own = accelerator.prepare(DummyScheduler(made, lr_scheduler_callable=lambda one: StepLR(one, 1, 0.5)))
    assert isinstance(own.scheduler, StepLR)
    plain = Accelerator(cpu=True)
    model, optimizer = small()
    with refused(ConfigError, "DummyOptim", "torch.optim", key="deepspeed_config: optimizer"):
        plain.prepare(model, DummyOptim(model.parameters()))
    prepared = plain.prepare(optimizer)
    with refused(ConfigError, "DummyScheduler", "lr_scheduler_callable", key="deepspeed_config: scheduler"):
        plain.prepare(DummyScheduler(prepared))


def test_a_loop_that_would_train_nothing_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = small()
    with refused(ModelError, "AdamW", "prepare"):
        accelerator.prepare(optimizer)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    with refused(TrainingError, "backward", "prepare"):
        accelerator.backward(model(torch.ones(1, 3)).sum())
    with refused(ModelError, "SGD", "AdamW"):
        accelerator.prepare(torch.optim.SGD(prepared.parameters(), lr=1.0))
    loss = prepared(torch.ones(2, 3))
    with refused(TrainingError, "backward", "(2, 1)"):
        accelerator.backward(loss)
    accelerator.backward(loss.mean())
    with refused(TrainingError, "model.parameters()"):
        accelerator.clip_grad_norm_(prepared.module[0].parameters(), 1.0)
    with refused(TrainingError, "clip_grad_norm_", "norm_type=1"):
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=1)
    with refused(CheckpointError, "save_state", "backward", "step"):
        accelerator.save_state("unused")


def test_a_model_comes_first_and_its_optimizer_later() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(small()[0])
    answer = model(torch.ones(2, 3))
    assert answer.dtype == torch.float32  # computed in bf16, and given back as fp32
    assert accelerator.mixed_precision == "bf16"
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    after = accelerator.get_state_dict(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.dtype == torch.float32 for tensor in after.values())
    with accelerator.autocast():
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype == torch.bfloat16
    assert accelerator.free_memory(model, optimizer) == [None, None]


def test_weights_are_written_as_other_tools_read_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

    accelerator = Accelerator(cpu=True)
    model = Tied()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.save_model(prepared, tmp_path / "whole")
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == {"one.weight", "one.bias", "two.bias"}
    accelerator.save_model(prepared, tmp_path / "parts", max_shard_size="70B")
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) == 2
    assert (tmp_path / "parts" / "model.safetensors.index.json").exists()
    assert accelerator.unwrap_model(prepared) is model


def test_numbers_go_to_the_trackers_that_were_named(tmp_path: Path) -> None:
    class Own:
        name = "own"

        def __init__(self) -> None:
            self.seen: list[Any] = []

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.seen.append(values)

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.seen.append((step, values))

        def finish(self) -> None:
            self.seen.append("end")

    own = Own()
    accelerator = Accelerator(cpu=True, log_with=["jsonl", own], project_dir=tmp_path)
    accelerator.init_trackers("trial", config={"lr": 0.1})
    accelerator.log({"loss": 2.5}, step=7)
    accelerator.end_training()
    assert own.seen == [{"lr": 0.1}, (7, {"loss": 2.5}), "end"]
    events = [event for event in read_events((tmp_path / "trial").rglob("*.jsonl")) if event.kind == "train"]
    assert [(event.step, event.data["loss"]) for event in events] == [(7, 2.5)]
    assert accelerator.get_tracker("own") is own


def test_numbers_without_a_step_are_counted_and_wandb_is_told_what_the_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        config=SimpleNamespace(update=lambda rows, **_: told.update(config=rows)),
        log=lambda values: told.setdefault("steps", []).append(values["step"]),
        finish=lambda: None,
    )

    def init(**about: Any) -> Any:
        told.update(about)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, log_with="wandb", project_dir=tmp_path)
    accelerator.init_trackers("trial", config={"lr": 0.1}, init_kwargs={"wandb": {"name": "first"}})
    for step in (None, None, 9, None):
        accelerator.log({"loss": 1.0}, step=step)
    assert (told["name"], told["project"], told["config"]) == ("first", "trial", {"lr": "0.1"})
    assert told["steps"] == [0, 1, 9, 10]
    other = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    with refused(ConfigError, "csv", "wandb", key="init_kwargs"):
        other.init_trackers("trial", init_kwargs={"csv": {"flush_secs": 1}, "wandb": {"name": "unused"}})


def test_hooks_of_save_state_may_take_the_weights_that_they_save_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    taken: list[Any] = []

    def hook(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        taken.extend((models.pop(), weights.pop(), folder))

    accelerator.register_save_state_pre_hook(hook)
    folder = accelerator.save_state(tmp_path / "state")
    assert taken[0] is model
    assert torch.equal(taken[1]["weight"], model.weight)
    assert taken[2] == folder
    accelerator.load_state(folder)
    assert prepared(torch.ones(1, 2)).shape == (1, 1)


def test_small_things_work_alone(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.print("once")
    assert capsys.readouterr().out == "once\n"
    assert accelerator.on_main_process(lambda: 3)() == 3
    assert accelerator.on_process(lambda: 3, process_index=1)() is None
    assert not accelerator.check_trigger()
    accelerator.set_trigger()
    assert accelerator.check_trigger()
    assert not accelerator.check_trigger()
    with accelerator.split_between_processes([1, 2, 3]) as part, accelerator.main_process_first():
        assert part == [1, 2, 3]
    assert accelerator.gather(torch.tensor(2.0)).tolist() == [2.0]
    assert accelerator.gather_for_metrics(["a", "b"]) == ["a", "b"]
    set_seed(5)
    first = torch.rand(2)
    set_seed(5)
    assert torch.equal(first, torch.rand(2))
    loader = accelerator.prepare(DataLoader(list(range(10)), batch_size=4))
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)] == [[4, 5, 6, 7], [8, 9]]


def test_scripts_find_what_they_ask_for(caplog: pytest.LogCaptureFixture) -> None:
    from plait.frontends.accelerate.logging import get_logger
    from plait.frontends.accelerate.utils import DistributedType, broadcast_object_list, gather_object

    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.NO
    state = accelerator.state
    assert (state.num_processes, state.process_index, state.deepspeed_plugin) == (1, 0, None)
    assert gather_object([1, 2]) == broadcast_object_list([1, 2]) == [1, 2]
    logger = get_logger("a script", log_level="INFO")
    logger.info("once")
    logger.info("everywhere, %s", "in turn", main_process_only=False, in_order=True)
    assert caplog.messages == ["once", "everywhere, in turn"]


def test_what_accelerate_launch_says_is_heeded_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # Accelerate itself leaves that behind: nobody has launched us
    assert Accelerator(cpu=True).mixed_precision == "no"
    said = {"MIXED_PRECISION": "bf16", "USE_CPU": "True", "GRADIENT_ACCUMULATION_STEPS": "4", "USE_FSDP": "false"}
    for name, value in said.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    accelerator = Accelerator()
    assert (accelerator.mixed_precision, accelerator.device.type) == ("bf16", "cpu")
    assert accelerator.gradient_accumulation_steps == 4
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with refused(ConfigError, "FSDP", "torch.compile", "config_file", key="accelerate launch"):
        Accelerator()
    assert Accelerator(sections={"strategy": "zero2"}).config.strategy.stage == 2


def test_names_lie_where_scripts_import_them_from() -> None:
    import plait.frontends.accelerate as accelerate

    assert all(getattr(accelerate, name) is not None for name in accelerate.__all__)
    state = accelerate.PartialState(cpu=True)
    assert (state.num_processes, state.is_main_process, state.device.type) == (1, True, "cpu")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.split_batches, accelerator.even_batches) == (False, True)
    loader = accelerator.prepare(DataLoader(list(range(6)), batch_size=2))
    assert [batch.tolist() for batch in accelerate.skip_first_batches(loader, 2)] == [[4, 5]]


def test_a_loop_starts_again_with_smaller_batches_where_memory_is_short() -> None:
    from accelerate.utils import find_executable_batch_size as theirs

    from plait.frontends.accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def train_once(batch_size: int, fits: int, name: str = "") -> str:
        tried.append(batch_size)
        if batch_size > fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if not name:
            raise RuntimeError("another matter")
        return name

    train = find_executable_batch_size(train_once, starting_batch_size=16)
    assert train(5, name="done") == "done"
    sizes, tried = tried, []
    theirs(train_once, starting_batch_size=16)(5, name="done")
    assert sizes == tried
    with pytest.raises(RuntimeError, match="another matter"):
        train(16)
    with refused(TrainingError, "starting_batch_size=16"):
        train(0)


def test_states_travel_without_pickle() -> None:
    import numpy as np

    state = {"a": torch.arange(3), "b": [1, (2.5, float("-inf"))], 3: {"x": np.arange(2.0)}, "n": None, "t": True}
    tensors: dict[str, torch.Tensor] = {}
    import json

    packed = json.loads(json.dumps(pack(state, tensors, "state"), allow_nan=False))
    back = unpack(packed, tensors)
    assert torch.equal(back["a"], state["a"])
    assert back["b"] == state["b"]
    assert np.array_equal(back[3]["x"], state[3]["x"])
    assert (back["n"], back["t"]) == (None, True)
    with refused(CheckpointError, "state.f", "function"):
        pack({"f": pack}, {}, "state")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_gradients_are_clipped_to_something_above_zero(limit: float) -> None:
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(2, 1)
    model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with refused(TrainingError, f"max_norm={limit}"):
        accelerator.clip_grad_norm_(model.parameters(), limit)
    with refused(TrainingError, f"clip_value={limit}"):
        accelerator.clip_grad_value_(model.parameters(), limit)


def test_a_model_whose_parameters_are_elsewhere_is_refused() -> None:
    """As DeepSpeed's `zero.Init` leaves it."""
    model, optimizer = small()
    model[2].weight.data = torch.empty(0)
    with refused(ModelError, "'2.weight'", "(0,)"):
        Accelerator(cpu=True).prepare(model, optimizer)
