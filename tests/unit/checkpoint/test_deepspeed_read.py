"""DeepSpeed's layouts, laid out here by hand: any number of ranks, and what can be wrong with a folder."""

from __future__ import annotations

import errno
import math
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor

from plait.checkpoint.convert.deepspeed import DeepSpeedSource, is_deepspeed
from plait.checkpoint.convert.files import Inert, open_file
from plait.errors import CheckpointError

SHAPES = {
    "decayed": {"a.weight": (5, 7), "b.weight": (1, 3), "c.weight": (4, 4, 2)},
    "plain": {"a.bias": (5,), "scalar": (), "one": (1,)},
}
STATES = ("exp_avg", "exp_avg_sq")


class Scaler:
    """Pickled as DeepSpeed pickles its loss scaler, of a module that is gone when the file is read."""


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("deepspeed_of_the_writer")
    monkeypatch.setattr(Scaler, "__module__", module.__name__)
    module.Scaler = Scaler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def values() -> dict[str, Tensor]:
    """Weights, moments and what is not trained, all random, by the names of a source."""
    found = {}
    for shapes in SHAPES.values():
        for name, shape in shapes.items():
            found[f"model.{name}"] = torch.randn(shape)
            found |= {f"optim.{name}.{key}": torch.randn(shape) for key in STATES}
            found[f"optim.{name}.step"] = torch.tensor(11.0)
    found["model.frozen"] = torch.randn(3, 5).half()
    found["model.counter"] = torch.tensor(7)
    return found


def model_states(truth: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    module = {name.removeprefix("model."): tensor for name, tensor in truth.items() if name.startswith("model.")}
    return {
        "module": module | {"a.tied": module["a.weight"]},
        "buffer_names": ["counter"],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes.items()} for shapes in SHAPES.values()],
        "shared_params": {"a.tied": "a.weight"},
        "global_steps": 12,
        "dp_world_size": 1,
        "ds_version": "0.15.1",
        **more,
    }


def flat(truth: dict[str, Tensor], names: list[str], key: str, gap: int) -> Tensor:
    entries = [f"model.{name}" if key == "fp32" else f"optim.{name}.{key}" for name in names]
    return torch.cat([part for entry in entries for part in (truth[entry].flatten(), torch.full((gap,), -1.0))])


def save_stage_2(root: Path, truth: dict[str, Tensor], ranks: int, *, gap: int = 0, elastic: bool = False) -> Path:
    """What stages 1 and 2 save; `gap` elements lie after each parameter."""
    tag = root / "global_step12"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    torch.save(model_states(truth, dp_world_size=ranks), tag / "mp_rank_00_model_states.pt")
    groups = {key: [flat(truth, list(shapes), key, gap) for shapes in SHAPES.values()] for key in ("fp32", *STATES)}
    for rank in range(ranks):
        own: dict[str, list[Tensor]] = {}
        paddings = []
        for key, tensors in groups.items():
            own[key] = []
            for tensor in tensors:
                size = math.ceil(tensor.numel() / ranks)
                missing = size * ranks - tensor.numel() if rank == ranks - 1 else 0
                padded = torch.cat([tensor, tensor.new_zeros(size * ranks - tensor.numel())])
                lean = max(0, size - missing) if elastic or key == "fp32" else size
                own[key].append(padded[rank * size : (rank + 1) * size][:lean].clone())
                paddings.append(missing)
        each = [{key: own[key][group] for key in STATES} for group in range(len(SHAPES))]
        base: Any = each
        if not elastic:
            base = {
                "state": dict(enumerate({"step": torch.tensor(11.0), **state} for state in each)),
                "param_groups": [{"params": [group]} for group in range(len(SHAPES))],
            }
        shard = {
            "base_optimizer_state": base,
            "base_optimizer_state_step": 11,
            "single_partition_of_fp32_groups": own["fp32"],
            "group_paddings": paddings[: len(SHAPES)],
            "partition_count": [ranks, ranks],
            "zero_stage": 2,
        }
        if gap:
            shard["param_alignment_paddings"] = [[gap] * len(shapes) for shapes in SHAPES.values()]
        torch.save({"optimizer_state_dict": shard}, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return root


def cut(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    size = math.ceil(tensor.numel() / ranks)
    padded = torch.cat([tensor.flatten(), tensor.new_zeros(size * ranks - tensor.numel())])
    return padded[rank * size : (rank + 1) * size].clone()


def save_stage_3(root: Path, truth: dict[str, Tensor], ranks: int) -> Path:
    tag = root / "global_step12"
    tag.mkdir(parents=True)
    (root / "latest").write_text(tag.name)
    for rank in range(ranks):
        empty = {name: torch.empty(0) for shapes in SHAPES.values() for name in shapes}
        module = empty | {"frozen": torch.empty(0).half(), "counter": truth["model.counter"]}
        states = model_states(
            truth,
            module=module,
            dp_world_size=ranks,
            shared_params={"a.tied": "a.weight"} if rank == 0 else {},
            frozen_param_shapes={"frozen": torch.Size((3, 5))},
            frozen_param_fragments={"frozen": cut(truth["model.frozen"], rank, ranks)},
        )
        torch.save(states, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        groups = [
            {
                key: torch.cat(
                    [cut(truth[f"model.{n}" if key == "fp32" else f"optim.{n}.{key}"], rank, ranks) for n in shapes]
                )
                for key in ("fp32", *STATES)
            }
            for shapes in SHAPES.values()
        ]
        shard = {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": [group.pop("fp32") for group in groups],
            "optimizer_state_dict": {
                "state": {index: {"step": 11, **group} for index, group in enumerate(groups)},
                "param_groups": [{"params": [0]}, {"params": [1]}],
            },
        }
        torch.save({"optimizer_state_dict": shard}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return root


def assert_reads(path: Path, truth: dict[str, Tensor]) -> None:
    with DeepSpeedSource(path) as source:
        assert source.entries.keys() == truth.keys()
        for name, value in truth.items():
            assert source.entries[name] == (value.shape, value.dtype), name
            assert torch.equal(source.read(name), value), name


# ---- layouts


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("gap", [0, 3])
def test_stages_1_and_2_of_any_number_of_ranks(tmp_path: Path, ranks: int, gap: int) -> None:
    truth = values()
    assert_reads(save_stage_2(tmp_path, truth, ranks, gap=gap), truth)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_elastic_checkpoints_have_their_steps_and_padding_elsewhere(tmp_path: Path, ranks: int) -> None:
    truth = values()
    assert_reads(save_stage_2(tmp_path, truth, ranks, elastic=True), truth)


@pytest.mark.parametrize("ranks", [1, 2, 3, 50])
def test_stage_3_of_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    truth = values()
    assert_reads(save_stage_3(tmp_path, truth, ranks), truth)


def test_only_the_pieces_of_one_parameter_are_read(tmp_path: Path) -> None:
    truth = values()
    with DeepSpeedSource(save_stage_2(tmp_path, truth, 2)) as source:
        gone = tmp_path / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        gone.unlink()
        # It has 35 of the 70 elements of its group: all that rank 0 keeps.
        assert torch.equal(source.read("model.a.weight"), truth["model.a.weight"])
        with refused(CheckpointError, gone, os.strerror(errno.ENOENT)):
            source.read("model.c.weight")


def test_a_tensor_that_lies_transposed_in_its_file_is_read_as_it_was(tmp_path: Path) -> None:
    whole = torch.randn(4, 6)
    torch.save({"a": whole.t()[1:, ::2], "b": whole[1:3], "fp8": whole.to(torch.float8_e4m3fn)}, tmp_path / "x.pt")
    found = open_file(tmp_path / "x.pt")
    assert torch.equal(found["a"].read(), whole.t()[1:, ::2])
    assert torch.equal(found["b"].read(), whole[1:3])
    assert torch.equal(found["fp8"].read().float(), whole.to(torch.float8_e4m3fn).float())


# ---- what is no tensor


def test_a_loss_scaler_is_read_without_the_package_that_made_it(
    tmp_path: Path, vanishing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = values()
    root = save_stage_2(tmp_path, truth, 1)
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in truth.items()}
    torch.save(model_states(half), root / "global_step12" / "mp_rank_00_model_states.pt")
    path = root / "global_step12" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path)
    scaler = Scaler()
    scaler.__dict__.update(cur_scale=1024.0, cur_iter=12, last_overflow_iter=4, cur_hysteresis=2, dynamic=True)
    content["optimizer_state_dict"]["loss_scaler"] = scaler
    torch.save(content, path)
    monkeypatch.delitem(sys.modules, vanishing.__name__)
    with DeepSpeedSource(root) as source:
        assert source.state["engine"]["scaler"] == {"scale": 1024.0, "clean_steps": 7, "tolerance": 2}
        assert source.facts["dtype"] == "fp16"


class Exploit:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_pickle_that_would_run_a_command_is_read_and_not_run(tmp_path: Path) -> None:
    truth = values()
    root = save_stage_2(tmp_path / "checkpoint", truth, 2)
    trap = model_states(truth, lr_scheduler=Exploit(f"touch {tmp_path}/ran"))
    torch.save(trap, root / "global_step12" / "mp_rank_00_model_states.pt")
    assert_reads(root, truth)
    assert not (tmp_path / "ran").exists()
    noted = open_file(root / "global_step12" / "mp_rank_00_model_states.pt")["lr_scheduler"]
    assert isinstance(noted, Inert)
    assert noted.known_as.endswith(".system")


# ---- stage 0


def stage_0(root: Path, weights: dict[str, Tensor], groups: list[list[str]], **wrapper: Any) -> dict[str, Tensor]:
    """Save it; returns the moments, by the names of a source."""
    names = [name for group in groups for name in group]
    moments = {name: {key: torch.randn(weights[name].shape) for key in STATES} for name in names}
    numbers = iter(range(len(names)))
    inner = {
        "state": {index: {"step": torch.tensor(3.0), **moments[name]} for index, name in enumerate(names)},
        "param_groups": [{"params": [next(numbers) for _ in group]} for group in groups],
    }
    optimizer = {"optimizer_state_dict": inner, **wrapper} if wrapper else inner
    states = {"module": weights, "buffer_names": [], "optimizer": optimizer, "param_shapes": None, "global_steps": 3}
    (root / "tag").mkdir()
    torch.save(states, root / "tag" / "mp_rank_00_model_states.pt")
    return {f"optim.{name}.{key}": value for name, kept in moments.items() for key, value in kept.items()}


def test_stage_0_finds_out_whose_state_is_whose(tmp_path: Path) -> None:
    weights = {"a": torch.randn(2, 3), "x": torch.randn(4), "b": torch.randn(2, 3), "y": torch.randn(4)}
    moments = stage_0(tmp_path, weights, [["a", "b"], ["x", "y"]])
    with DeepSpeedSource(tmp_path / "tag") as source:
        assert all(torch.equal(source.read(name), value) for name, value in moments.items())


def test_stage_0_does_not_guess(tmp_path: Path) -> None:
    weights = {"a": torch.randn(2, 3), "b": torch.randn(2, 3), "c": torch.randn(2, 3)}
    moments = stage_0(tmp_path, weights, [["a", "c"]])
    with refused(CheckpointError, "(2, 3)", 2, "a, b, c", "order"):
        DeepSpeedSource(tmp_path / "tag")
    with DeepSpeedSource(tmp_path / "tag", order=["a", "c"]) as source:
        assert all(torch.equal(source.read(name), value) for name, value in moments.items())
    with DeepSpeedSource(tmp_path / "tag", order=()) as source:
        assert source.entries.keys() == {"model.a", "model.b", "model.c"}
    with refused(CheckpointError, "order", "['z']"):
        DeepSpeedSource(tmp_path / "tag", order=["a", "z"])


@pytest.mark.parametrize("fused", [True, False])
def test_stage_0_in_16_bits_finds_the_master_weights_by_their_values(tmp_path: Path, fused: bool) -> None:
    names = [["a", "d"], ["c"]]  # b is frozen, and of the same shape
    masters = {name: torch.randn(2, 3) for name in "abcd"}
    weights = {name: master.bfloat16() for name, master in masters.items()}
    groups = [[masters[name] for name in group] for group in names]
    if fused:
        wrapper = {"fp32_groups_flat": [torch.cat([master.flatten() for master in group]) for group in groups]}
        flat_state = [torch.randn(12), torch.randn(6)]
        inner = {
            "state": {index: {"step": 3, "exp_avg": state} for index, state in enumerate(flat_state)},
            "param_groups": [{"params": [0]}, {"params": [1]}],
        }
        moments = {"optim.d.exp_avg": flat_state[0][6:].view(2, 3), "optim.c.exp_avg": flat_state[1].view(2, 3)}
        states = {"module": weights, "optimizer": {"optimizer_state_dict": inner, **wrapper}, "global_steps": 3}
        torch.save(states, tmp_path / "mp_rank_00_model_states.pt")
        folder = tmp_path
    else:
        moments = stage_0(tmp_path, weights, names, fp32_groups=groups)
        folder = tmp_path / "tag"
    with DeepSpeedSource(folder) as source:
        assert all(torch.equal(source.read(f"model.{name}"), masters[name]) for name in "acd")
        assert torch.equal(source.read("model.b"), weights["b"])
        assert all(torch.equal(source.read(name), value) for name, value in moments.items())


# ---- folders that are not whole


def test_a_missing_shard_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 3)
    (root / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with refused(CheckpointError, root / "global_step12", "optim_states", "[1]", "zero_pp_rank_2_mp_rank"):
        DeepSpeedSource(root)


def test_a_missing_model_file_of_stage_3_is_named(tmp_path: Path) -> None:
    root = save_stage_3(tmp_path, values(), 2)
    (root / "global_step12" / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with refused(CheckpointError, root / "global_step12", "model_states", "[1]"):
        DeepSpeedSource(root)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 2)
    path = root / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(path, path.stat().st_size // 2)
    with refused(CheckpointError, path, path.stat().st_size):
        DeepSpeedSource(root)


def test_weights_without_their_optimizer_files_are_refused(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 1)
    (root / "global_step12" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with refused(CheckpointError, root / "global_step12", "ZeRO", "*_optim_states.pt"):
        DeepSpeedSource(root)


def test_two_saves_in_one_folder_are_not_mixed(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 1)
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    (root / "global_step12" / f"bf16_{name}").write_bytes(b"")
    with refused(CheckpointError, root / "global_step12", f"bf16_{name}", f" {name}"):
        DeepSpeedSource(root)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mp_rank_01_model_states.pt", "tensor"),
        ("layer_03-model_00-model_states.pt", "pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    root = save_stage_2(tmp_path, values(), 1)
    (root / "global_step12" / name).write_bytes(b"")
    with refused(CheckpointError, root / "global_step12", kind, name, "ds_to_universal"):
        DeepSpeedSource(root)


def test_a_pointer_to_nowhere_is_explained(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 1)
    (root / "latest").write_text("global_step99")
    with refused(CheckpointError, root / "latest", "'global_step99'", "global_step12"):
        DeepSpeedSource(root)


def test_moments_that_were_kept_on_nvme_are_explained(tmp_path: Path) -> None:
    root = save_stage_3(tmp_path, values(), 1)
    path = root / "global_step12" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = torch.load(path)
    content["optimizer_state_dict"]["fp32_flat_groups"] = [torch.empty(0), torch.empty(0)]
    torch.save(content, path)
    with refused(CheckpointError, "NVMe", "offload_optimizer"):
        DeepSpeedSource(root)


def test_a_layout_that_is_not_known_is_said_to_be_so(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path, values(), 1)
    torch.save(model_states(values(), param_shapes=None), root / "global_step12" / "mp_rank_00_model_states.pt")
    with refused(CheckpointError, root / "global_step12", "TypeError"):
        DeepSpeedSource(root)


def test_a_folder_is_recognised_by_its_names(tmp_path: Path) -> None:
    root = save_stage_2(tmp_path / "checkpoint", values(), 1)
    assert is_deepspeed(root)
    assert is_deepspeed(root / "global_step12")
    assert not is_deepspeed(tmp_path)


def test_another_folder_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with refused(CheckpointError, tmp_path, "*_model_states.pt", "notes.txt", "latest"):
        DeepSpeedSource(tmp_path)
