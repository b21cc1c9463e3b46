"""What scripts import from Accelerate, and what they find there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader

from plait.errors import CheckpointError, ConfigError, TrainingError
from plait.frontends.accelerate import Accelerator
from plait.frontends.accelerate import utils as own
from plait.frontends.accelerate.tracking import GeneralTracker, on_main_process

ROOMS = {
    "state": ["AcceleratorState", "DistributedType", "PartialState", "is_initialized"],
    "tracking": ["GeneralTracker", "on_main_process"],
    "data_loader": ["DataLoaderShard", "SeedableRandomSampler", "skip_first_batches"],
    "optimizer": ["AcceleratedOptimizer"],
    "scheduler": ["AcceleratedScheduler"],
    "logging": ["get_logger"],
    "utils": own.__all__,
    "utils.dataclasses": ["LoggerType", "PrecisionType", "DistributedType", "ProfileKwargs"],
    "utils.imports": ["is_wandb_available", "is_xpu_available"],
    "utils.memory": ["find_executable_batch_size", "release_memory"],
    "utils.operations": ["gather", "gather_object", "convert_outputs_to_fp32"],
    "utils.other": ["extract_model_from_parallel", "is_compiled_module"],
    "utils.random": ["set_seed", "synchronize_rng_states"],
    "utils.tqdm": ["tqdm"],
    "utils.versions": ["compare_versions", "is_torch_version"],
}


@pytest.mark.parametrize("room", ROOMS)
def test_names_lie_where_accelerate_has_them(room: str) -> None:
    real = importlib.import_module(f"accelerate.{room}")
    mine = importlib.import_module(f"plait.frontends.accelerate.{room}")
    assert [name for name in ROOMS[room] if not hasattr(mine, name) or not hasattr(real, name)] == []


def test_functions_for_nested_tensors_answer_as_accelerate_does() -> None:
    import accelerate.utils as real

    nested = {"a": torch.arange(4.0).half(), "b": [torch.ones(4, 2), (torch.zeros(4),)], "c": "text"}
    tensors = {"a": torch.ones(2), "b": [torch.zeros(3, 2)]}
    for name, argument in (("find_batch_size", nested), ("listify", tensors), ("convert_to_fp32", nested)):
        assert str(getattr(own, name)(argument)) == str(getattr(real, name)(argument)), name
    assert str(own.concatenate([tensors, tensors])) == str(real.concatenate([tensors, tensors]))
    assert own.recursively_apply(lambda part, more: part.sum() + more, tensors, 1.0)["b"][0] == 1.0
    with refused(TypeError, "str", "sum"):
        own.recursively_apply(torch.sum, nested, error_on_other_type=True)
    assert own.convert_outputs_to_fp32(lambda: torch.ones(1).half())().dtype == torch.float32
    assert own.release_memory(1, 2) == [None, None]
    assert own.is_torch_version(">=", "2.0")
    assert not own.compare_versions(TorchVersion("1.9.0"), ">", "1.10")
    assert own.PrecisionType.list() == ["no", "fp16", "bf16"]
    assert [*own.tqdm([1, 2], disable=True)] == [1, 2]
    own.synchronize_rng_states(["torch"])
    with refused(TrainingError, "'xla'", "torch", "cuda", "generator"):
        own.synchronize_rng_state("xla")


def test_the_state_is_that_of_the_accelerator() -> None:
    from plait.frontends.accelerate.state import AcceleratorState, is_initialized

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState() is accelerator
    assert AcceleratorState().mixed_precision == "bf16"
    with refused(TrainingError, "AcceleratorState", "mixed_precision='fp16'"):
        AcceleratorState(mixed_precision="fp16")
    model = accelerator.prepare(nn.Linear(2, 2))
    assert own.extract_model_from_parallel(model) is model.module
    assert own.is_compiled_module(torch.compile(nn.Linear(1, 1)))


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    @on_main_process
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.lines.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.lines.append((step, values))


def test_trackers_are_found_by_name_and_unwrapped(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=[Notes(), own.LoggerType.TENSORBOARD], project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 1})
    accelerator.log({"loss": 2.0}, step=3)
    assert accelerator.get_tracker("notes", unwrap=True) == [{"lr": 1}, (3, {"loss": 2.0})]
    assert [each.name for each in accelerator.trackers] == ["notes", "tensorboard"]
    accelerator.trackers[1].writer.add_scalar("extra", 1.0, 0)  # as scripts do that draw images
    assert accelerator.get_tracker("tensorboard", unwrap=True) is accelerator.trackers[1].writer
    with refused(ValueError, "'wandb'", "notes", "tensorboard"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_a_tracker_without_a_name_is_refused() -> None:
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with refused(NotImplementedError, "Nameless", "name", "tracker"):
        Nameless()


def test_a_block_is_profiled(tmp_path: Path) -> None:
    kwargs = own.ProfileKwargs(activities=["cpu"], output_trace_dir=tmp_path)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    with accelerator.profile() as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert "aten::mm" in {each.key for each in profiler.key_averages()}
    assert (tmp_path / "profile_0.json").exists()
    with refused(ConfigError, "'tpu'", "cpu", "cuda", key="ProfileKwargs.activities"):
        own.ProfileKwargs(activities=["tpu"]).build()


def test_handlers_that_cannot_be_honoured_are_refused() -> None:
    from accelerate.utils import DistributedDataParallelKwargs as Theirs

    names = "accelerate.utils.dataclasses.DistributedDataParallelKwargs", "plait.frontends.accelerate.utils"
    with refused(ConfigError, *names, key="kwargs_handlers"):
        Accelerator(cpu=True, kwargs_handlers=[Theirs(bucket_cap_mb=1)])
    hook = own.DDPCommunicationHookType
    for given in ({"comm_hook": hook.POWER_SGD}, {"comm_wrapper": "power_sgd"}):
        with refused(ConfigError, "power_sgd", "BF16", key=f"DistributedDataParallelKwargs.{next(iter(given))}"):
            Accelerator(cpu=True, kwargs_handlers=[own.DistributedDataParallelKwargs(**given)])  # type: ignore[arg-type]
    with refused(ConfigError, "comm_hook", "fp16", "comm_wrapper", "bf16", key="DistributedDataParallelKwargs"):
        own.DistributedDataParallelKwargs(comm_hook=hook.FP16, comm_wrapper=hook.BF16).sections()
    assert own.DistributedDataParallelKwargs(comm_wrapper="bf16").sections()["precision"] == {"reduce": "bf16"}


def test_a_discriminator_s_leftover_gradients_do_not_stop_a_save(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    maker, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (maker, critic))
    maker, critic, first, second, data = accelerator.prepare(
        maker, critic, first, second, DataLoader(torch.ones(4, 2), batch_size=2)
    )
    for x in data:
        accelerator.backward(critic(maker(x)).mean())
        with refused(CheckpointError, "save_state", "backward", "step"):
            accelerator.save_state(tmp_path / "early")
        first.step()  # the critic's gradients stay until its zero_grad, at the start of the next round
        accelerator.save_state(tmp_path / "state")
        before = critic.weight.clone()
        second.zero_grad()
        second.step()
        assert torch.equal(critic.weight, before)


@pytest.mark.parametrize(
    ("line", "name", "remedy"),
    [
        ("from plait.frontends.accelerate.local_sgd import LocalSGD", "local_sgd", "gradient_accumulation_steps"),
        ("from plait.frontends.accelerate import notebook_launcher", "notebook_launcher", "plait launch"),
        ("from plait.frontends.accelerate.utils import FP8RecipeKwargs", "utils.FP8RecipeKwargs", "fp8"),
        ("from plait.frontends.accelerate.utils import no_such", "utils.no_such", "docs/accelerate.md"),
    ],
)
def test_an_import_of_what_is_not_offered_says_so(line: str, name: str, remedy: str) -> None:
    with refused(ModuleNotFoundError, f"accelerate.{name}", remedy):
        exec(line)
