"""A folder for DeepSpeed, written and read back. That DeepSpeed resumes from it is shown in `tests/multi`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint.convert.deepspeed import DeepSpeedSource, write_deepspeed
from plait.checkpoint.convert.source import Source, TensorEntry
from plait.errors import CheckpointError


class Held(Source):
    kind = "plait"

    def __init__(self, tensors: dict[str, Tensor], *, steps: int | None = 9) -> None:
        self.path = Path("memory")
        self.tensors = tensors
        self.entries = {name: TensorEntry(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.state = {} if steps is None else {"engine": {"steps": steps, "skips_in_a_row": 0, "scaler": None}}
        self.facts = {}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        pass


def state() -> dict[str, Tensor]:
    """Two trained parameters, one of them a view into a larger storage; a frozen one, and a buffer of integers."""
    weights = {"a.weight": torch.randn(100, 7)[3:8], "a.bias": torch.randn(5)}
    tensors = {f"model.{name}": value for name, value in weights.items()}
    for name, value in weights.items():
        tensors |= {f"optim.{name}.{key}": torch.randn(value.shape) for key in ("exp_avg", "exp_avg_sq")}
        tensors[f"optim.{name}.step"] = torch.tensor(8.0)
    return tensors | {"model.frozen": torch.randn(40, 50).bfloat16(), "model.counter": torch.arange(3)}


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    tensors = state()
    write_deepspeed(Held(tensors), tmp_path / "out")
    with DeepSpeedSource(tmp_path / "out") as source:
        assert source.entries == {name: TensorEntry(value.shape, value.dtype) for name, value in tensors.items()}
        assert all(torch.equal(source.read(name), value) for name, value in tensors.items())
        assert source.state["engine"]["steps"] == 9
        assert source.facts["stage"] == "universal"


def test_the_size_is_that_of_the_folder_and_holds_no_more_than_the_tensors(tmp_path: Path) -> None:
    tensors = state()
    size = write_deepspeed(Held(tensors), tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert size == sum(path.stat().st_size for path in files)
    # A small archive has a head of a kilobyte or two; the frozen weights must not have got moments of their own size.
    assert size < sum(value.nbytes for value in tensors.values()) + 2_500 * len(files)


def test_weights_in_16_bits_become_fp32_for_the_optimizer(tmp_path: Path) -> None:
    tensors = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state().items()}
    write_deepspeed(Held(tensors), tmp_path / "out")
    with DeepSpeedSource(tmp_path / "out") as source:
        assert source.entries["model.a.weight"].dtype == torch.float32
        assert source.entries["model.frozen"].dtype == torch.bfloat16
        assert torch.equal(source.read("model.a.weight"), tensors["model.a.weight"].float())


def test_weights_alone_are_step_0(tmp_path: Path) -> None:
    weights = {name: value for name, value in state().items() if name.startswith("model.")}
    write_deepspeed(Held(weights, steps=None), tmp_path / "out")
    assert (tmp_path / "out" / "latest_universal").read_text() == "global_step0"
    with DeepSpeedSource(tmp_path / "out") as source:
        assert source.entries == {name: TensorEntry(value.shape, value.dtype) for name, value in weights.items()}


def test_the_model_can_be_given_all_weights_as_the_docs_say(tmp_path: Path) -> None:
    tensors = state()
    write_deepspeed(Held(tensors), tmp_path / "out")
    loaded = {f.parent.name: torch.load(f)["param"] for f in (tmp_path / "out").glob("*/zero/*/fp32.pt")}
    expected = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_states_of_another_shape_are_refused(tmp_path: Path) -> None:
    source = Held({"model.w": torch.randn(4, 5), "optim.w.row_var": torch.randn(4), "optim.w.step": torch.tensor(1.0)})
    with refused(CheckpointError, "optim.w.row_var", "(4,)", "(4, 5)"):
        write_deepspeed(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_parameters_that_count_differently_are_refused(tmp_path: Path) -> None:
    tensors = state()
    tensors["optim.a.bias.step"] = torch.tensor(5.0)
    with refused(CheckpointError, "a.bias", 5, "a.weight", 8):
        write_deepspeed(Held(tensors), tmp_path / "out")


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    write_deepspeed(Held(state()), tmp_path / "out")
    with refused(CheckpointError, tmp_path / "out", "--overwrite"):
        write_deepspeed(Held(state()), tmp_path / "out")


class Failing(Held):
    def read(self, name: str) -> Tensor:
        if name == "model.frozen":
            raise CheckpointError("the source is damaged")
        return super().read(name)


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_deepspeed(Failing(state()), tmp_path / "out")
    assert not list(tmp_path.iterdir())
