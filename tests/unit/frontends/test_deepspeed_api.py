"""DeepSpeed's API in one process: what is given to `initialize`, and the names around it."""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import plait.frontends.deepspeed as deepspeed
from plait.errors import CheckpointError, ConfigError, ModelError, TrainingError, WorldError
from plait.frontends.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from plait.frontends.deepspeed.ops.lamb import FusedLamb
from plait.frontends.deepspeed.ops.lion import FusedLion
from plait.frontends.deepspeed.saving import state_name

pytestmark = pytest.mark.usefixtures("no_group_left")

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 3)
        self.answer = 42

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.relu(self.up(x))), y)


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def losses(engine: Any, steps: int = 4) -> list[float]:
    found = []
    for index in range(steps):
        loss = engine(*batch(index))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    return found


def begin(**given: Any) -> Any:
    return deepspeed.initialize(**{"model": net(), "config": CONFIG, **given})[0]


# ---- the configuration


def test_a_configuration_is_a_mapping_a_file_or_base64(tmp_path: Path) -> None:
    text = json.dumps(CONFIG)
    (tmp_path / "ds.json").write_text(f"// as people write it\n{text}")
    expected = losses(begin())
    assert losses(begin(config=str(tmp_path / "ds.json"))) == expected
    assert losses(begin(config=base64.urlsafe_b64encode(text.encode()).decode())) == expected
    assert losses(begin(config=None, config_params=CONFIG)) == expected


@pytest.mark.parametrize(
    "words",
    [
        "--deepspeed --deepspeed_config ds.json",
        "--deepspeed_config=ds.json -p 2 --deepspeed",
        "--deepspeed_config ds.json -p 2",
        "-p 2 --deepspeed ds.json",
        "--deepscale --deepscale_config ds.json",
    ],
)
def test_the_command_line_names_it_in_any_order(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args(words.split())
    assert begin(args=args, config=None).train_batch_size() == 8


def test_none_or_two_different_configurations_are_refused() -> None:
    with refused(ConfigError, "--deepspeed_config", key="config"):
        begin(config=None)
    with refused(ConfigError, "args.deepspeed_config", 2, key="config"):
        begin(args=argparse.Namespace(deepspeed_config="ds.json"))


def test_a_refused_key_is_named_before_anything_is_built() -> None:
    with refused(ConfigError, "'OneBitAdam'", key="optimizer.type"):
        begin(config={**CONFIG, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-2}}})


def test_what_became_of_the_keys_is_told_in_brief(capsys: pytest.CaptureFixture[str]) -> None:
    begin(config={**CONFIG, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8}})
    told = capsys.readouterr().out
    assert not missing(next(line for line in told.splitlines() if "ZeRO" in line), "stage 1", "fp32", "cpu", 8)
    assert "zero_optimization.reduce_bucket_size" in told
    assert len(told.splitlines()) < 8


# ---- what is given


def test_a_users_own_optimizer_and_scheduler_stay_the_same_objects() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, updating, loader, stepping = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={key: value for key, value in CONFIG.items() if key != "optimizer"},
    )
    assert (updating, stepping, loader) == (optimizer, scheduler, None)
    losses(engine)
    assert engine.get_lr() == [0.025]


def test_rates_wait_while_steps_are_skipped() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = begin(config={**CONFIG, "gradient_accumulation_steps": 1, "train_batch_size": 4, "scheduler": schedule})
    for index in range(3):
        loss = engine(*batch(index)) * (float("nan") if index == 1 else 1.0)
        engine.backward(loss)
        engine.step()
        assert engine.was_step_applied() == (index != 1)
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    assert engine.get_lr() == [pytest.approx(0.0025)]


def test_training_data_come_back_as_a_loader_of_micro_batches() -> None:
    data = TensorDataset(torch.randn(20, 6), torch.randint(3, (20,)))
    engine, _, loader, _ = deepspeed.initialize(model=net(), config=CONFIG, training_data=data)
    assert loader is not None
    assert len(loader) == 5
    assert [len(y) for _, y in loader] == [4] * 5
    assert engine.train_batch().ndim == 0
    assert engine.global_steps == 1
    repeating = deepspeed.utils.RepeatingLoader(loader)
    assert len([next(repeating) for _ in range(7)]) == 7


def test_a_model_without_an_optimizer_answers_and_does_not_train() -> None:
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config={"train_batch_size": 4})
    assert optimizer is None
    loss = engine(*batch(0))
    with refused(TrainingError, "engine.backward()", "initialize", "`optimizer`"):
        engine.backward(loss)


def test_a_function_that_makes_the_model_will_do() -> None:
    engine = begin(model=Net)
    assert losses(engine)[0] > 0


def test_the_scripts_own_seed_goes_on_counting() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = net()
    torch.manual_seed(5)
    deepspeed.initialize(model=model, config=CONFIG)
    assert torch.equal(torch.rand(3), expected)


# ---- the engine


def test_the_engine_tells_what_it_is() -> None:
    engine = begin(config={**CONFIG, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert engine.get_batch_info() == (8, 4, 2)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert engine.zero_optimization_stage() == 2
    assert engine.bfloat16_enabled()
    assert not engine.fp16_enabled()
    assert engine.gradient_clipping() == 1.0
    assert (engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0)
    assert engine.answer == 42  # the model's own
    assert engine.get_global_grad_norm() is None
    with refused(AttributeError, "DeepSpeedEngine", "'nothing_of_the_kind'"):
        engine.nothing_of_the_kind  # noqa: B018


def test_the_size_of_a_step_can_be_changed_between_steps() -> None:
    engine = begin()
    losses(engine, 2)
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 4, 1)
    losses(engine, 2)
    assert (engine.global_steps, engine.micro_steps) == (3, 4)
    engine.set_train_batch_size(12)
    losses(engine, 3)
    assert engine.global_steps == 4
    with refused(ConfigError, 6, 4, key="train_batch_size"):
        engine.set_train_batch_size(6)


def test_gradients_are_not_dropped_in_the_middle_of_a_step() -> None:
    engine = begin()
    engine.zero_grad()
    engine.backward(engine(*batch(0)))
    with refused(TrainingError, "engine.zero_grad()", 1, "engine.step()"):
        engine.zero_grad()


def test_a_model_is_compiled_by_the_configuration_or_not_at_all() -> None:
    with refused(TrainingError, "engine.compile()", "deepcompile"):
        begin().compile()
    engine = begin(config={**CONFIG, "compile": {"deepcompile": True}})
    engine.compile()
    assert engine.is_compiled


def test_lines_and_times_have_deepspeeds_form(capsys: pytest.CaptureFixture[str]) -> None:
    engine = begin(config={**CONFIG, "steps_per_print": 2, "wall_clock_breakdown": True})
    losses(engine, 4)
    lines = capsys.readouterr().out.splitlines()
    assert "[Rank 0] step=2, skipped=0, lr=[0.01], mom=[(0.9, 0.999)]" in lines
    assert any(line.startswith("time (ms) | fwd: ") and "| bwd: " in line and "| step: " in line for line in lines)
    assert any(line.startswith("time (ms) | fwd_microstep: ") for line in lines)


def test_samples_a_second_are_told_and_a_script_counts_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    engine = begin(config={**CONFIG, "steps_per_print": 2})
    losses(engine, 4)
    assert "SamplesPerSec" not in capsys.readouterr().out, "the first two steps are not measured"
    engine.tput_timer.update_epoch_count()
    losses(engine, 4)
    line = next(line for line in capsys.readouterr().out.splitlines() if "SamplesPerSec" in line)
    assert line.startswith("epoch=1/micro_step=4/global_step=4, RunningAvgSamplesPerSec=")
    assert engine.tput_timer.avg_samples_per_sec() > 0


def test_curves_go_where_the_monitors_say(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    engine = begin(config={**CONFIG, "csv_monitor": monitor})
    losses(engine, 4)
    engine.destroy()
    rows = (tmp_path / "mine" / "train.csv").read_text().splitlines()
    assert len(rows) == 3
    assert {"loss", "lr", "samples", "grad_norm"} <= set(rows[0].split(","))


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    engine = begin()
    found = engine.eval_batch(iter([batch(0), batch(1)]))
    expected = [net()(*batch(index)).item() for index in range(2)]
    assert float(found) == pytest.approx(sum(expected) / 2)
    assert engine.module.training


# ---- the names around it


def test_names_that_are_not_offered_say_so() -> None:
    with refused(AttributeError, "deepspeed.tp_model_init", "autotp_size"):
        deepspeed.tp_model_init  # noqa: B018
    assert not hasattr(deepspeed, "DeepSpeedTransformerLayer")
    with refused(AttributeError, "deepspeed.comm.log_summary", "docs/deepspeed-api.md"):
        deepspeed.comm.log_summary  # noqa: B018
    with refused(ModelError, "deepspeed.moe.layer.MoE", "strategy.layout.ep"):
        deepspeed.moe.layer.MoE(8, nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import plait.frontends.deepspeed.compression.compress", ["deepspeed.compression"]),
        ("from plait.frontends.deepspeed.profiling.flops_profiler import x", ["deepspeed.profiling", "plait profile"]),
        ("from plait.frontends.deepspeed import tp_model_init", ["deepspeed.tp_model_init", "autotp_size"]),
        (
            "from plait.frontends.deepspeed.ops import sparse_attention",
            ["deepspeed.ops.sparse_attention", "docs/deepspeed-api.md"],
        ),
    ],
)
def test_an_import_of_what_is_not_offered_says_so(line: str, names: list[str]) -> None:
    with refused(ModuleNotFoundError, *names) as caught:
        exec(line)
    assert "plait.frontends" not in str(caught.value)


def test_other_imports_have_pythons_own_words() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'plait\.frontends\.nothing'"):
        importlib.import_module("plait.frontends.nothing")


def test_translating_a_configuration_loads_no_torch() -> None:
    code = "import sys, plait.frontends.deepspeed as d; d.__version__; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_every_public_name_is_there() -> None:
    for name in deepspeed.__all__:
        assert getattr(deepspeed, name) is not None
    from plait.frontends.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
    from plait.frontends.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live

    estimate_zero2_model_states_mem_needs_all_live(net(), 2)
    estimate_zero3_model_states_mem_needs_all_live(net(), 2)


@pytest.mark.parametrize("make", [FusedAdam, DeepSpeedCPUAdam, FusedLamb, FusedLion])
def test_its_optimizers_are_taken_as_objects(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    engine = begin(model=model, optimizer=make(model.parameters(), lr=1e-2))
    found = []
    for _ in range(8):
        loss = engine(*batch(0))
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    assert found[-1] < found[0]
    assert isinstance(engine.optimizer, make)
    assert any(line.split()[1:2] == ["optimizer"] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("decoupled", [True, False])
def test_its_adam_is_torchs_adamw_or_adam(decoupled: bool) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    ours, theirs = net(), net()
    theirs.load_state_dict(ours.state_dict())
    made = [
        FusedAdam(ours.parameters(), adam_w_mode=decoupled, **options),
        (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs.parameters(), **options),
    ]
    for _ in range(3):
        for model, optimizer in zip((ours, theirs), made, strict=True):
            optimizer.zero_grad()
            model(*batch(0)).backward()
            optimizer.step()
    assert [state_name(optimizer) for optimizer in made] == ["AdamW" if decoupled else "Adam"] * 2
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_options_that_its_optimizers_lack_are_named() -> None:
    with refused(ConfigError, "false", key="bias_correction"):
        FusedAdam(net().parameters(), bias_correction=False)


def test_recomputing_gives_the_same_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), torch.randn(4, 6, requires_grad=True)
    model(x).sum().backward()
    expected = x.grad
    for in_cpu in (None, True):
        deepspeed.checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
        assert deepspeed.checkpointing.is_configured()
        x.grad = None
        deepspeed.checkpointing.checkpoint(model, x).sum().backward()
        assert torch.equal(x.grad, expected)


def test_a_model_is_built_in_host_memory() -> None:
    with torch.device("meta"), deepspeed.zero.Init():
        assert nn.Linear(2, 2).weight.device.type == "cpu"
    with torch.device("meta"), deepspeed.zero.Init(enabled=False):
        assert nn.Linear(2, 2).weight.device.type == "meta"
    with refused(ConfigError, "remote_device", "'nvme'"):
        deepspeed.zero.Init(remote_device="nvme")


def test_a_model_without_values_gets_them() -> None:
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        model = Net()
    assert model.up.weight.is_meta
    assert torch.empty(0).device.type == "cpu"
    assert losses(begin(model=model))[0] > 0


def test_inference_answers_in_a_smaller_format(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
    x = torch.randn(2, 6)
    expected = model(x)
    engine = deepspeed.init_inference(model, dtype=torch.bfloat16, replace_with_kernel_inject=True)
    assert engine(x).dtype == torch.bfloat16
    assert torch.allclose(engine(x).float(), expected, atol=0.05)
    assert "replace_with_kernel_inject" in capsys.readouterr().out
    with refused(ConfigError, "dtype", "torch.int8", "torch.bfloat16"):
        deepspeed.init_inference(model, dtype=torch.int8)
    with refused(ConfigError, "quant", "{'enabled': True}"):
        deepspeed.init_inference(model, dtype="fp32", quant={"enabled": True})


def test_the_device_is_asked_in_deepspeeds_words() -> None:
    device = deepspeed.get_accelerator()
    assert device.device(0).type == device.device_name()
    assert device.available_memory() <= device.total_memory()
    assert torch.float32 in device.supported_dtypes()
    device.synchronize()
    with refused(AttributeError, "deepspeed.accelerator.Stream", "docs/deepspeed-api.md"):
        device.Stream  # noqa: B018


def test_joining_alone_gives_a_group_of_one() -> None:
    with refused(WorldError, "dist_init_required=False", "torch.distributed.init_process_group"):
        deepspeed.init_distributed(dist_init_required=False)
    deepspeed.init_distributed()
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()) == (0, 1, 0)
    box = torch.ones(2)
    deepspeed.comm.all_reduce(box)
    deepspeed.comm.barrier()
    assert deepspeed.comm.get_all_ranks_from_group() == [0]


def test_a_tied_layer_stands_first_and_once_more() -> None:
    tied = [deepspeed.TiedLayerSpec("a", nn.Linear, 2, 2) for _ in range(3)]
    with refused(ModelError, "0, 1, 2"):
        deepspeed.PipelineModule(tied, num_stages=1)
    with refused(ConfigError, "'profile'", "'uniform'", key="partition_method"):
        deepspeed.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2, partition_method="profile")


def test_an_optimizer_of_another_kind_does_not_take_a_checkpoint(tmp_path: Path) -> None:
    engine = begin()
    losses(engine, 2)
    engine.save_checkpoint(tmp_path)
    model = net()
    other = begin(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with refused(CheckpointError, "AdamW", "SGD", "load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(other.module.up.weight, engine.module.up.weight)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam"])
def test_an_optimizer_of_the_file_takes_groups_of_the_script(kind: str) -> None:
    params = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}
    config = {"train_batch_size": 4, "gradient_clipping": 0, "optimizer": {"type": kind, "params": params}}
    net, plain = Net(), Net()
    plain.load_state_dict(net.state_dict())
    made: Any = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.AdamW}[kind]
    own = made(groups(plain), **params, weight_decay=0.0)  # DeepSpeed's default
    engine = deepspeed.initialize(model=net, model_parameters=groups(net), config=config)[0]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.1, 0.01]
    for _ in range(3):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))
        engine.backward(engine(x, y))
        engine.step()
        own.zero_grad()
        plain(x, y).backward()
        own.step()
    torch.testing.assert_close(net.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


def groups(net: Net) -> list[dict[str, Any]]:
    return [{"params": list(net.up.parameters())}, {"params": list(net.down.parameters()), "lr": 0.01}]


@pytest.mark.parametrize("precision", [{}, {"fp16": {"enabled": True, "initial_scale_power": 8}}], ids=["fp32", "fp16"])
def test_the_loss_scale_is_on_the_optimizer_from_the_start(precision: dict[str, Any]) -> None:
    optimizer: Any = deepspeed.initialize(model=Net(), config={**CONFIG, **precision})[1]
    assert (optimizer.cur_scale, optimizer.overflow) == (256.0 if precision else 1.0, False)


def test_a_schedule_of_the_scripts_own_has_a_rate_for_a_group_without_parameters() -> None:
    model = net()
    groups = [{"params": model.up.parameters()}, {"params": []}, {"params": model.down.parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (s + 1), lambda s: 1.0, lambda s: 2.0])
    config = {"train_batch_size": 4}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    losses(engine, 1)
    assert engine.get_lr() == [0.05, 0.1, 1.0]


def test_without_a_schedule_a_group_without_parameters_is_let_go() -> None:
    model = net()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}], lr=0.1)
    _, updating, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config={"train_batch_size": 4})
    assert len(updating.param_groups) == 1


def test_a_model_whose_parameters_are_elsewhere_is_refused() -> None:
    """As real DeepSpeed's `zero.Init` leaves it."""
    model = net()
    model.down.weight.data = torch.empty(0)
    with refused(ModelError, "'down.weight'", "(0,)"):
        deepspeed.initialize(model=model, config=CONFIG)
