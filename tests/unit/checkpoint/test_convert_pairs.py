"""Every kind of checkpoint becomes every other, value by value."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.refusals import refused
from tests.unit.checkpoint.samples import (
    DESCRIPTION,
    STEPS,
    assert_same,
    contents,
    model_of,
    some_state,
    write_fsdp,
    write_hf,
    write_plait,
    write_torch_file,
)
from torch import Tensor

from plait.checkpoint.convert.conversion import Format, convert, select_for
from plait.checkpoint.convert.deepspeed import write_deepspeed
from plait.checkpoint.convert.detect import open_source
from plait.checkpoint.convert.huggingface import Description
from plait.checkpoint.convert.source import averaged, cast, translated
from plait.errors import CheckpointError

State = dict[str, Tensor]


def write_for_deepspeed(path: Path, state: State) -> Path:
    with open_source(write_plait(path.with_name("between"), state)) as source:
        write_deepspeed(source, path)
    return path


SOURCES: dict[str, Callable[[Path, State], Path]] = {
    "plait": write_plait,
    "hf": write_hf,
    "torch": lambda path, state: write_torch_file(path.with_suffix(".pt"), state),
    "dcp": write_fsdp,
    "deepspeed": write_for_deepspeed,
}


def run(path: Path, target: Path, to: Format, **options: Any) -> None:
    with open_source(path) as opened:
        source = select_for(opened, to, optimizer=options.get("optimizer", False))
        convert(source, target, to, description=Description(DESCRIPTION), **options)


def weights(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


@pytest.mark.parametrize("to", ["plait", "torch", "hf", "deepspeed"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_pair(tmp_path: Path, kind: str, to: Format) -> None:
    state = some_state()
    if "deepspeed" in (kind, to):  # it keeps one fp32 copy of every weight
        state = {name: tensor.float() for name, tensor in state.items()}
    if kind == "hf":
        state = weights(state)
    path = SOURCES[kind](tmp_path / "from", state)
    target = tmp_path / ("to.pt" if to == "torch" else "to")
    optimizer = to == "torch" and kind != "hf"
    run(path, target, to, optimizer=optimizer)
    with open_source(target) as made:
        assert made.kind == to
        assert_same(contents(made), weights(state) if to == "hf" else state)
        if to != "hf" and kind != "hf":
            assert made.state["engine"]["steps"] == STEPS


def test_a_folder_for_transformers_is_split_at_the_size_that_is_asked_for(tmp_path: Path) -> None:
    state = some_state()
    path = write_plait(tmp_path / "from", state)
    run(path, tmp_path / "one", "hf")
    assert (tmp_path / "one/model.safetensors").is_file()
    assert not (tmp_path / "one/model.safetensors.index.json").exists()
    run(path, tmp_path / "many", "hf", shard_size=400)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model_of(state).values())
    found: State = {}
    for file in files:
        part = load_file(tmp_path / "many" / file)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 400
        found |= part
    assert_same(found, model_of(state))


def test_a_dtype_is_for_the_weights_alone_and_the_description_tells_it(tmp_path: Path) -> None:
    state = {**some_state(), "model.count": torch.arange(3)}
    with open_source(write_plait(tmp_path / "from", state)) as opened:
        source = cast(opened, torch.float16)
        convert(source, tmp_path / "all.pt", "torch", optimizer=True)
        found = torch.load(tmp_path / "all.pt", weights_only=True)
        convert(select_for(source, "hf", optimizer=False), tmp_path / "hf", "hf", description=Description(DESCRIPTION))
    expected = {n: t.half() if t.is_floating_point() else t for n, t in model_of(state).items()}
    assert_same(found["model"], expected)
    assert all(t.dtype == torch.float32 for pieces in found["optim"]["state"].values() for t in pieces.values())
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "float16"


def test_a_torch_file_is_a_plain_state_dict_that_other_tools_can_check(tmp_path: Path) -> None:
    state = some_state()
    run(write_plait(tmp_path / "from", state), tmp_path / "weights.pt", "torch")
    assert_same(torch.load(tmp_path / "weights.pt", weights_only=True), model_of(state))
    assert_same(torch.load(tmp_path / "weights.pt", weights_only=True, mmap=True), model_of(state))
    with zipfile.ZipFile(tmp_path / "weights.pt") as archive:
        assert archive.testzip() is None  # every checksum is right


def test_an_optimizer_in_a_torch_file_is_one_that_torch_takes(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    state: State = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, tensor in model.named_parameters():
        state |= {f"optim.{name}.exp_avg": torch.randn(tensor.shape), f"optim.{name}.step": torch.tensor(3.0)}
        state |= {f"optim.{name}.exp_avg_sq": torch.rand(tensor.shape)}
    about = {"config": {"optim": {"type": "AdamW", "lr": 0.25, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.5}}}
    run(write_plait(tmp_path / "from", state, **about), tmp_path / "all.pt", "torch", optimizer=True)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    optimizer = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, optimizer, found["optim"])
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state[f"optim.{name}.exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert found["state"]["config"] == about["config"]


def test_companions_travel_with_the_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    description = Description(DESCRIPTION, {"tokenizer.json": tmp_path / "tokenizer.json"}, {"extra.json": "[]"})
    with open_source(write_hf(tmp_path / "from", some_state())) as source:
        convert(source, tmp_path / "to", "hf", description=description)
    assert {path.name for path in (tmp_path / "to").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "extra.json",
    }
    found = json.loads((tmp_path / "to/config.json").read_text())
    assert {key: found[key] for key in DESCRIPTION} == DESCRIPTION


def test_averages_stand_in_for_the_weights_they_are_of(tmp_path: Path) -> None:
    state = some_state()
    trained = [name for name in state if name.startswith("model.")][1:]
    state |= {f"hook.ema.{n.removeprefix('model.')}": torch.randn_like(state[n].float()) for n in trained}
    with open_source(write_plait(tmp_path / "from", state)) as source:
        found = contents(averaged(source))
        assert "engine" not in averaged(source).state
    assert found.keys() == {name for name in state if name.startswith("model.")}
    for name, tensor in found.items():
        assert torch.equal(tensor, state[f"hook.ema.{name.removeprefix('model.')}" if name in trained else name])
    plain = write_plait(tmp_path / "plain", some_state())
    with open_source(plain) as source, refused(CheckpointError, plain, "`ema`", "--weights"):
        averaged(source)


def test_a_translation_takes_the_optimizer_along(tmp_path: Path) -> None:
    state = {
        "model.q": torch.randn(3, 4),
        "model.k": torch.randn(3, 4),
        "optim.q.exp_avg": torch.randn(3, 4),
        "optim.k.exp_avg": torch.randn(3, 4),
        "optim.q.step": torch.tensor(2.0),
        "optim.k.step": torch.tensor(2.0),
        "hook.other": torch.randn(2),
    }
    made = {"qk": (("q", "k"), lambda q, k: torch.cat([q, k]).t().contiguous())}
    with open_source(write_plait(tmp_path / "from", state)) as source:
        found = contents(translated(source, made))
    assert_same(
        found,
        {
            "model.qk": torch.cat([state["model.q"], state["model.k"]]).t(),
            "optim.qk.exp_avg": torch.cat([state["optim.q.exp_avg"], state["optim.k.exp_avg"]]).t(),
            "optim.qk.step": torch.tensor(2.0),
            "hook.other": state["hook.other"],
        },
    )


def test_a_translation_that_does_not_fit_says_what_is_missing_and_what_is_left_over(tmp_path: Path) -> None:
    path = write_plait(tmp_path / "from", {"model.q": torch.randn(3), "model.odd": torch.randn(3)})
    made = {"q": (("q",), lambda q: q), "k": (("k",), lambda k: k)}
    with open_source(path) as source:
        with refused(CheckpointError, path) as caught:
            translated(source, made)
        assert [row.split()[0] for row in str(caught.value).splitlines()[1:]] == ["k", "odd"]
        assert translated(source, {"q": made["q"]}, unused=["^odd$"]).entries.keys() == {"model.q"}


def test_state_that_has_not_the_shape_of_its_parameter_does_not_follow_it(tmp_path: Path) -> None:
    state = {"model.w": torch.randn(3, 4), "optim.w.row_var": torch.randn(3)}
    with (
        open_source(write_plait(tmp_path / "from", state)) as source,
        refused(CheckpointError, "optim.w.row_var", "(3,)"),
    ):
        translated(source, {"v": (("w",), lambda w: w.t())})
