"""Checkpoints made by real DeepSpeed, read; and written ones that real DeepSpeed resumes from."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import plait
from plait.checkpoint.convert.conversion import convert
from plait.checkpoint.convert.deepspeed import DeepSpeedSource, write_deepspeed
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.engine.base import Engine, StepResult
from plait.errors import CheckpointError
from plait.trainer import Hook
from tests.multi.deepspeed_peer import DECAY, LR, make_universal, tokens, toy, train_all
from tests.multi.deepspeed_ranks import run_deepspeed
from tests.multi.ranks import RankPool
from tests.refusals import refused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)"
)

STEPS = 4


# ---- what DeepSpeed saved, read

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{stage}-{dtype}": {"stage": stage, "dtype": dtype} for stage in range(4) for dtype in ("fp32", "bf16")},
    "1-elastic": {"stage": 1, "dtype": "bf16", "zero": {"elastic_checkpoint": True}},
    "2-aligned": {"stage": 2, "dtype": "fp32", "zero": {"parameter_alignment": True}},
    "2-robin": {"stage": 2, "dtype": "fp32", "zero": {"parameter_alignment": True, "round_robin_gradients": True}},
    "3-subgroups": {"stage": 3, "dtype": "fp32", "zero": {"sub_group_size": 100}},
}
UNEVEN = {f"{stage}-three-ranks": {"stage": stage, "dtype": "fp32"} for stage in (1, 2, 3)}
ALL = [*VARIANTS, *UNEVEN]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Every variant after some steps: the folder of all, and what DeepSpeed says of each."""
    root = tmp_path_factory.mktemp("deepspeed")

    def jobs(variants: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"name": name, "steps": STEPS, "save": str(root / name), **job} for name, job in variants.items()]

    return root, run_deepspeed(train_all, 2, jobs(VARIANTS)) | run_deepspeed(train_all, 3, jobs(UNEVEN))


@pytest.mark.parametrize("variant", [name for name in ALL if name != "2-robin"])
def test_every_value_is_the_one_deepspeed_itself_gives(trained: tuple[Path, dict[str, Any]], variant: str) -> None:
    root, said = trained
    with DeepSpeedSource(root / variant) as source:
        truth = {name: value for name, value in said[variant]["saved"].items() if name != "model.scratch"}
        assert {name for name in source.entries if not name.endswith(".step")} == {*truth, "model.positions"}
        for name, value in truth.items():
            assert torch.equal(source.read(name), value), name
            assert source.entries[name] == TensorEntry(value.shape, value.dtype), name


def test_weights_are_the_models_where_the_order_is_another_than_the_addresses_say(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    """[Note: addresses that are not trusted]"""
    root, _ = trained
    copy = torch.load(root / "2-robin" / f"global_step{STEPS}" / "mp_rank_00_model_states.pt")
    with DeepSpeedSource(root / "2-robin") as source:
        weights = {name: value for name, value in copy["module"].items() if name != "head.weight"}
        assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())


@pytest.mark.parametrize("variant", ALL)
def test_frozen_parameters_buffers_and_tied_names_are_there(trained: tuple[Path, dict[str, Any]], variant: str) -> None:
    with DeepSpeedSource(trained[0] / variant) as source:
        model = toy()
        dtype = torch.bfloat16 if source.facts["dtype"] == "bf16" else torch.float32
        assert torch.equal(source.read("model.positions"), model.positions.to(dtype))
        assert "model.head.weight" not in source.entries
        assert source.state["tied"] == {"head.weight": "embedding.weight"}
        assert not any(name.startswith("optim.positions") for name in source.entries)


@pytest.mark.parametrize("variant", ALL)
def test_the_facts_say_who_wrote_it(trained: tuple[Path, dict[str, Any]], variant: str) -> None:
    with DeepSpeedSource(trained[0] / variant) as source:
        expected = (VARIANTS | UNEVEN)[variant]
        assert source.facts["written by"].startswith("DeepSpeed 0.")
        assert source.facts["stage"] == str(expected["stage"])
        assert source.facts["ranks"] == ("3" if variant in UNEVEN else "2")
        assert source.facts["dtype"] == "bf16" if expected["dtype"] == "bf16" else "fp32"
        assert source.state["engine"] == {"steps": STEPS, "skips_in_a_row": 0, "scaler": None}


def test_the_folder_of_a_tag_is_read_as_the_one_above_it(trained: tuple[Path, dict[str, Any]]) -> None:
    folder = trained[0] / "2-fp32"
    with DeepSpeedSource(folder) as above, DeepSpeedSource(folder / f"global_step{STEPS}") as tag:
        assert above.entries == tag.entries


@pytest.mark.parametrize("variant", [f"{stage}-bf16" for stage in (1, 2, 3)])
def test_what_ds_to_universal_makes_of_it_reads_the_same(
    trained: tuple[Path, dict[str, Any]], variant: str, tmp_path: Path
) -> None:
    from_here, to = trained[0] / variant / f"global_step{STEPS}", tmp_path / f"global_step{STEPS}"
    run_deepspeed(make_universal, 1, str(from_here), str(to))
    with DeepSpeedSource(from_here) as before, DeepSpeedSource(tmp_path) as after:
        assert after.entries == before.entries
        assert all(torch.equal(after.read(name), before.read(name)) for name in before.entries)


# ---- resumed by Plait


OPTIM = {"type": "AdamW", "lr": LR, "weight_decay": DECAY, "no_decay": ["bias", "norm", "*.gate"]}


def native() -> Engine:
    return plait.prepare(toy(), optim=OPTIM, device="cpu")


def resume(engine: Engine, source: Source) -> None:
    states = {name.removeprefix("optim."): entry for name, entry in source.entries.items() if name.startswith("optim.")}
    engine.allocate_optimizer_state(states)
    tensors = engine.state_tensors()
    assert tensors.keys() == source.entries.keys()
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(source.read(name))
    engine.state_loaded()
    engine.restore(source.state["engine"])


def train(engine: Engine, steps: int) -> list[float]:
    return [engine.train_step([tokens(engine.steps)]).loss for _ in range(steps)]


@pytest.mark.parametrize("variant", [name for name in ALL if "bf16" not in name and name != "1-elastic"])
def test_a_native_run_goes_on_from_it_as_deepspeed_does(trained: tuple[Path, dict[str, Any]], variant: str) -> None:
    root, said = trained
    engine = native()
    with DeepSpeedSource(root / variant) as source:
        resume(engine, source)
    assert train(engine, 3) == pytest.approx(said[variant]["losses"][STEPS:], rel=1e-5)


class Losses(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_step(self, runner: plait.Runner, result: StepResult) -> None:
        self.found.append(result.loss)


def go_on(rank: int, size: int, resume: str, work_dir: str, strategy: str) -> list[float]:
    """A run on the batches that DeepSpeed saw, continued from a checkpoint."""
    rows = [row for step in range(STEPS + 3) for row in tokens(step)]
    losses = Losses()
    runner = plait.Runner(
        model=toy(),
        data=DataLoader(rows, batch_size=len(tokens(0)) // size),  # type: ignore[arg-type]
        optim=OPTIM,
        train={"max_steps": STEPS + 3},
        checkpoint={"resume": resume},
        strategy=strategy,
        hooks=[losses],
        work_dir=work_dir,
        device="cpu",
        log={"console": "none", "sinks": []},
    )
    with runner:
        runner.train()
    return losses.found


@pytest.mark.parametrize("variant", ["1-fp32", "2-fp32", "3-fp32"])
def test_a_run_resumes_what_was_converted_on_any_ranks(
    two_ranks: RankPool, trained: tuple[Path, dict[str, Any]], tmp_path: Path, variant: str
) -> None:
    root, said = trained
    with refused(CheckpointError, "'deepspeed'", "plait convert", root / variant, "--to plait"):
        go_on(0, 1, str(root / variant), str(tmp_path / "direct"), "ddp")
    with open_source(root / variant) as source:
        convert(source, tmp_path / "converted", "plait")
    expected = pytest.approx(said[variant]["losses"][STEPS:], rel=1e-5)
    assert go_on(0, 1, str(tmp_path / "converted"), str(tmp_path / "one"), "ddp") == expected
    for losses in two_ranks.run(go_on, str(tmp_path / "converted"), str(tmp_path / "two"), "zero3"):
        assert losses == expected


# ---- written, and resumed by DeepSpeed


class Held(Source):
    """The state of an engine."""

    kind = "plait"

    def __init__(self, engine: Engine, *, optimizer: bool = True) -> None:
        wanted = ("model.", "optim.") if optimizer else ("model.",)
        held = {name: tensor.clone() for name, tensor in engine.state_tensors().items() if name.startswith(wanted)}
        self.path = Path("memory")
        self.tensors = held
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in held.items()}
        self.state = {"engine": engine.state()} if optimizer else {}
        self.facts = {}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def resumed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Held, list[float], list[float], dict[str, Any]]:
    """A native run written for DeepSpeed; its losses from there on; those of a fresh one; what DeepSpeed says."""
    root = tmp_path_factory.mktemp("written")
    engine = native()
    fresh = Held(engine, optimizer=False)
    from_scratch = train(engine, STEPS)
    held = Held(engine)
    write_deepspeed(held, root / "run")
    write_deepspeed(fresh, root / "fresh")
    jobs = [
        {
            "name": f"{kind}-{stage}",
            "stage": stage,
            "dtype": "fp32",
            "steps": 0,
            "universal": True,
            "load": str(root / kind),
        }
        for kind in ("run", "fresh")
        for stage in (1, 2, 3)
    ]
    said = {
        f"{name}-{ranks}": answer for ranks in (1, 2) for name, answer in run_deepspeed(train_all, ranks, jobs).items()
    }
    return held, train(engine, 3), from_scratch[:3], said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_what_was_written_and_goes_on_as_the_native_run_does(
    resumed: tuple[Held, list[float], list[float], dict[str, Any]], stage: int, ranks: int
) -> None:
    held, losses, _, all_said = resumed
    said = all_said[f"run-{stage}-{ranks}"]
    for name, value in said["loaded"].items():
        if name not in ("model.seen", "model.scratch"):
            assert torch.equal(value, held.tensors[name]), name
    assert said["losses"] == pytest.approx(losses, rel=1e-5)
    assert said["steps"] == STEPS + 3


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_alone_are_loaded_with_an_optimizer_that_starts(
    resumed: tuple[Held, list[float], list[float], dict[str, Any]], stage: int, ranks: int
) -> None:
    _, _, losses, all_said = resumed
    assert all_said[f"fresh-{stage}-{ranks}"]["losses"] == pytest.approx(losses, rel=1e-5)
