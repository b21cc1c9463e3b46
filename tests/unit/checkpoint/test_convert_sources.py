"""Checkpoints of every kind are opened without executing anything in them, and say what is wrong with them."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.refusals import refused
from tests.unit.checkpoint.samples import (
    STEPS,
    assert_same,
    contents,
    model_of,
    optimizer_of,
    some_state,
    write_dcp,
    write_fsdp,
    write_hf,
    write_plait,
    write_torch_file,
)

from plait.checkpoint.convert.detect import open_source
from plait.errors import CheckpointError

ENGINE = {"engine": {"steps": STEPS, "skips_in_a_row": 0, "scaler": None}}


def only_weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


def test_a_plait_checkpoint_is_read_and_so_is_the_newest_of_a_run(tmp_path: Path) -> None:
    first, second = some_state(), some_state()
    write_plait(tmp_path / "run/checkpoints/step-00000001", first)
    write_plait(tmp_path / "run/checkpoints/step-00000007", second)
    with open_source(tmp_path / "run") as source:
        assert source.kind == "plait"
        assert source.state["engine"]["steps"] == STEPS
        assert_same(contents(source), second)
    with open_source(tmp_path / "run/checkpoints/step-00000001") as source:
        assert_same(contents(source), first)


def test_a_folder_of_transformers_is_read_whole_or_in_several_files(tmp_path: Path) -> None:
    state = some_state()
    with open_source(write_hf(tmp_path / "one", state)) as source:
        assert source.kind == "hf"
        assert source.facts["architecture"] == "LlamaForCausalLM"
        assert_same(contents(source), only_weights(state))
    (tmp_path / "many").mkdir()
    places = {}
    for number, (name, tensor) in enumerate(model_of(state).items()):
        save_file({name: tensor}, tmp_path / "many" / f"part{number}.safetensors")
        places[name] = f"part{number}.safetensors"
    (tmp_path / "many/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with open_source(tmp_path / "many") as source:
        assert_same(contents(source), only_weights(state))


def test_the_older_form_of_such_a_folder_is_read_too(tmp_path: Path) -> None:
    state = some_state()
    torch.save(model_of(state), tmp_path / "pytorch_model.bin")
    with open_source(tmp_path) as source:
        assert source.kind == "hf"
        assert_same(contents(source), only_weights(state))


def test_a_single_safetensors_file_is_a_state_dict(tmp_path: Path) -> None:
    state = some_state()
    save_file(model_of(state), tmp_path / "weights.safetensors")
    with open_source(tmp_path / "weights.safetensors") as source:
        assert source.kind == "torch"
        assert_same(contents(source), only_weights(state))


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module.", "_orig_mod."])
def test_a_state_dict_is_found_under_the_usual_wrappings(tmp_path: Path, wrap: str) -> None:
    state = some_state()
    content: Any = model_of(state)
    if wrap == "state_dict":
        content = {"state_dict": content, "epoch": 3}
    elif wrap != "plain":
        content = {f"{wrap}{name}": tensor for name, tensor in content.items()}
    torch.save(content, tmp_path / "weights.pt")
    with open_source(tmp_path / "weights.pt") as source:
        assert_same(contents(source), only_weights(state))
        assert source.state == {}  # no optimizer, so nothing to go on with


def test_an_optimizer_by_name_is_read(tmp_path: Path) -> None:
    state = some_state()
    with open_source(write_torch_file(tmp_path / "all.pth", state)) as source:
        assert_same(contents(source), state)
        assert source.state == ENGINE


def train_a_little(named: bool, groups: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    parameters: list[Any] = list(model.named_parameters()) if named else list(model.parameters())
    split = [{"params": parameters[::2]}, {"params": parameters[1::2]}] if groups == 2 else parameters
    optimizer = torch.optim.AdamW(split)
    for _ in range(STEPS):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("named", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_an_optimizer_by_number_is_read_where_the_order_is_beyond_doubt(
    tmp_path: Path, named: bool, groups: int
) -> None:
    model, optimizer = train_a_little(named, groups)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    with open_source(tmp_path / "all.pt") as source:
        found = contents(source)
        assert source.state == ENGINE
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(found[f"optim.{name}.{key}"], value)


def test_an_optimizer_by_number_in_two_nameless_groups_is_left_out_and_said_so(tmp_path: Path) -> None:
    model, optimizer = train_a_little(named=False, groups=2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    with open_source(tmp_path / "all.pt") as source:
        assert source.entries.keys() == {f"model.{name}" for name in model.state_dict()}
        assert source.facts["optimizer"]


def test_tensors_that_share_memory_or_lie_across_it_are_read_right(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    content = {"all": base, "part": base[2:4], "across": base.t(), "inner": base[1:5, 1:3], "none": torch.empty(0, 3)}
    torch.save(content, tmp_path / "views.pt")
    with open_source(tmp_path / "views.pt") as source:
        assert_same({n.removeprefix("model."): t for n, t in contents(source).items()}, content)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex64, torch.complex128),
]


def test_tensors_of_every_dtype_are_read_and_what_else_a_state_dict_holds_is_no_obstacle(tmp_path: Path) -> None:
    content: dict[str, Any] = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    content["parameter"] = torch.nn.Parameter(torch.randn(2))
    content["scalar"] = torch.randn(())
    content["buffer"] = torch.nn.Buffer(torch.randn(3))
    others = {"bytes": b"\x00\xff", "seen": Counter("aab"), "where": torch.device("cpu"), "kinds": {1, 2}, "z": 1j}
    torch.save({**content, "others": others, "version": torch.__version__}, tmp_path / "all.pt")
    with open_source(tmp_path / "all.pt") as source:
        found = contents(source)
    assert found.keys() == {f"model.{name}" for name in content}
    for name in content:
        # As bytes: fp8 has no comparison.
        given, wanted = found[f"model.{name}"], content[name].detach()
        assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(given.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def test_a_tensor_whose_values_are_not_those_in_the_file_is_refused(tmp_path: Path) -> None:
    torch.save({"conjugate": torch.randn(3, dtype=torch.complex64).conj()}, tmp_path / "view.pt")
    with refused(CheckpointError, tmp_path / "view.pt", "{'conj': True}"):
        open_source(tmp_path / "view.pt")


def test_a_file_from_before_the_archive_format_is_read(tmp_path: Path) -> None:
    state = some_state()
    torch.save(model_of(state), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with open_source(tmp_path / "old.pt") as source:
        assert_same(contents(source), only_weights(state))


@pytest.mark.parametrize("flat", [False, True])
def test_fsdp_folders_are_read_with_their_optimizer(tmp_path: Path, flat: bool) -> None:
    state = some_state()
    optimizer = optimizer_of(state)
    if flat:  # as with `flatten_optimizer_state_dict`
        pieces = {f"state.{p}.{k}": t for p, each in optimizer["state"].items() for k, t in each.items()}
        optimizer = {**pieces, **{f"param_groups.{p}.lr": 0.1 for p in optimizer["state"]}}
    content = {"model": model_of(state), "optim": optimizer, "step": STEPS}
    with open_source(write_dcp(tmp_path / "dcp", content)) as source:
        assert source.kind == "dcp"
        assert source.state == ENGINE
        assert_same(contents(source), state)


def test_a_bare_model_keeps_its_names_even_where_they_start_with_model(tmp_path: Path) -> None:
    state = some_state()
    with open_source(write_dcp(tmp_path / "dcp", model_of(state))) as source:
        assert_same(contents(source), only_weights(state))


def test_an_application_that_holds_both_is_understood(tmp_path: Path) -> None:
    state = some_state()
    content = {"app": {"model": model_of(state), "optim": optimizer_of(state)}}
    with open_source(write_dcp(tmp_path / "dcp", content)) as source:
        assert source.state == ENGINE  # counted by the optimizer itself
        assert_same(contents(source), state)


def test_what_belongs_to_neither_model_nor_optimizer_is_named(tmp_path: Path) -> None:
    content = {"model": {"weight": torch.randn(2)}, "loader": {"permutation": torch.arange(5)}}
    with open_source(write_dcp(tmp_path / "dcp", content)) as source:
        assert source.entries.keys() == {"model.weight"}
        assert "loader.permutation" in source.facts["left out"]


def test_the_first_format_of_plait_is_read(tmp_path: Path) -> None:
    state = {**some_state(), "hook.ema.weight": torch.randn(3)}
    folder = write_dcp(tmp_path / "checkpoints/step-00000007", state)
    about = {
        "format": 1,
        "step": STEPS,
        "world_size": 2,
        "versions": {"plait": "0.1.0"},
        "saved_at": 1.0,
        "state": ENGINE,
    }
    (folder / "manifest.json").write_text(json.dumps(about))
    for path in (folder, tmp_path):
        with open_source(path) as source:
            assert source.state == ENGINE
            assert "format 1" in source.facts["written by"]
            assert_same(contents(source), state)


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_code_in_a_file_of_torch_is_not_executed(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(2), "extra": Harmful(tmp_path / "harmed")}, tmp_path / "weights.pt")
    with refused(CheckpointError, tmp_path / "weights.pt", f"{os.system.__module__}.system"):
        open_source(tmp_path / "weights.pt")
    assert not (tmp_path / "harmed").exists()


def test_code_in_the_metadata_of_a_folder_is_not_executed(tmp_path: Path) -> None:
    folder = write_fsdp(tmp_path / "dcp", some_state())
    (folder / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "harmed")))
    with refused(CheckpointError, folder / ".metadata", f"{os.system.__module__}.system"):
        open_source(folder)
    assert not (tmp_path / "harmed").exists()


def test_code_in_the_chunks_of_a_folder_is_not_executed(tmp_path: Path) -> None:
    folder = write_fsdp(tmp_path / "dcp", {"model.weight": torch.randn(3)})
    chunk = next(folder.glob("*.distcp"))
    torch.save(Harmful(tmp_path / "harmed"), tmp_path / "harmful.pt")
    evil = (tmp_path / "harmful.pt").read_bytes()
    chunk.write_bytes(evil + b"\0" * max(0, chunk.stat().st_size - len(evil)))
    with refused(CheckpointError, chunk), open_source(folder) as source:
        source.read("model.weight")
    assert not (tmp_path / "harmed").exists()


def chunk_of(begin: int, size: int) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size([begin, 0]), sizes=torch.Size([size, 2]))


def lying(folder: Path, change: Callable[[Any], None]) -> Path:
    """A folder of two tensors whose `.metadata` says something else of them."""
    write_dcp(folder, {"model": {"a": torch.randn(4, 2), "b": torch.randn(3, 2)}})
    described = pickle.loads((folder / ".metadata").read_bytes())
    change(described)
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    return folder


@pytest.mark.parametrize(
    "chunks",
    [[(0, 3), (2, 2)], [(0, 4), (0, 4)], [(0, 1), (2, 2)], [(0, 3)], [(0, 2), (2, 3)], [(-1, 4), (3, 1)], []],
    ids=["overlap", "twice", "hole", "short", "beyond", "before", "none"],
)
def test_chunks_of_a_folder_that_do_not_make_up_their_tensor_are_refused(
    tmp_path: Path, chunks: list[tuple[int, int]]
) -> None:
    def change(described: Any) -> None:
        described.state_dict_metadata["model.a"].chunks = [chunk_of(*each) for each in chunks]

    folder = lying(tmp_path / "dcp", change)
    with refused(CheckpointError, folder / ".metadata", "model.a", (4, 2)):
        open_source(folder)


@pytest.mark.parametrize("place", ["../elsewhere.distcp", "/etc/hostname", "a/../../elsewhere.distcp"])
def test_chunks_outside_of_their_folder_are_refused(tmp_path: Path, place: str) -> None:
    def change(described: Any) -> None:
        for info in described.storage_data.values():
            info.relative_path = place

    folder = lying(tmp_path / "dcp", change)
    (tmp_path / "elsewhere.distcp").write_bytes(next(folder.glob("*.distcp")).read_bytes())
    with refused(CheckpointError, folder / ".metadata", repr(place)):
        open_source(folder)


def test_chunks_that_are_swapped_are_refused(tmp_path: Path) -> None:
    def change(described: Any) -> None:
        first, second = described.storage_data
        places = described.storage_data
        places[first], places[second] = places[second], places[first]

    folder = lying(tmp_path / "dcp", change)
    for name in ("model.a", "model.b"):
        with open_source(folder) as source, refused(CheckpointError, folder, name):
            source.read(name)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"K\x04\x85", b"K\x05\x85"), (b"K\x01\x85", b"K\x09\x85"), (b"K\x00K\x04\x85", b"K\x01K\x04\x85")],
    ids=["size", "stride", "offset"],
)
def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "all.pt"
    torch.save({"weight": torch.randn(4)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(path, "w") as lies:
        for name in whole.namelist():
            content = whole.read(name)
            if name.endswith("data.pkl"):
                assert content.count(old) == 1
                content = content.replace(old, new)
            lies.writestr(name, content)
    with refused(CheckpointError, path, "16 bytes"):
        open_source(path)


CUT = {
    "model.safetensors": write_hf,
    ".metadata": write_fsdp,
    "__0_0.distcp": write_fsdp,
    "all.pt": lambda path, state: write_torch_file(path.parent / "all.pt", state),
}


@pytest.mark.parametrize("name", CUT)
def test_a_truncated_file_is_named(tmp_path: Path, name: str) -> None:
    path = CUT[name](tmp_path / "whole", some_state())
    file = path if path.is_file() else path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with refused(CheckpointError, file), open_source(path) as source:
        contents(source)


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_fsdp(tmp_path / "dcp", some_state())
    (folder / "__0_0.distcp").unlink()
    with refused(CheckpointError, folder, "__0_0.distcp"):
        open_source(folder)
    (tmp_path / "hf").mkdir()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    with refused(CheckpointError, tmp_path / "hf", "model-00001-of-00002.safetensors"):
        open_source(tmp_path / "hf")


def test_what_is_no_checkpoint_is_answered_with_what_was_found_and_what_is_understood(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    with refused(CheckpointError, tmp_path, "notes.txt", "photos/", "work_dir"):
        open_source(tmp_path)
    with refused(CheckpointError, tmp_path / "notes.txt", "work_dir"):
        open_source(tmp_path / "notes.txt")
    with refused(CheckpointError, "/dev/null", "work_dir"):
        open_source(Path("/dev/null"))
    with refused(CheckpointError, tmp_path / "nowhere"):
        open_source(tmp_path / "nowhere")
    torch.save([1, 2], tmp_path / "numbers.pt")
    with refused(CheckpointError, tmp_path / "numbers.pt", "list"):
        open_source(tmp_path / "numbers.pt")
