"""Checkpoints of Megatron that cannot be read say why, and nothing in them is executed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused

from plait.checkpoint.convert.detect import open_source
from plait.errors import CheckpointError

ARGS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "kv_channels": 2,
    "max_position_embeddings": 8,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "untie_embeddings_and_output_weights": False,
}
LAYER = "decoder.layers.0."
MODEL = {
    "embedding.word_embeddings.weight": (6, 4),
    f"{LAYER}input_layernorm.weight": (4,),
    f"{LAYER}self_attention.linear_qkv.weight": (12, 4),
    f"{LAYER}self_attention.linear_proj.weight": (4, 4),
    f"{LAYER}pre_mlp_layernorm.weight": (4,),
    f"{LAYER}mlp.linear_fc1.weight": (10, 4),
    f"{LAYER}mlp.linear_fc2.weight": (4, 5),
    "decoder.final_layernorm.weight": (4,),
}


def write(root: Path, *, args: dict[str, Any] | None = None, content: dict[str, Any] | None = None) -> Path:
    """A checkpoint of one rank, in the format `torch`."""
    place = root / "iter_0000003" / "mp_rank_00"
    place.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("3\n")
    model = {name: torch.randn(shape) for name, shape in MODEL.items()}
    held = {"model": model, "iteration": 3, "args": argparse.Namespace(**{**ARGS, **(args or {})})}
    torch.save({**held, **(content or {})}, place / "model_optim_rng.pt")
    return root


def test_an_iteration_or_the_folder_around_it_may_be_named(tmp_path: Path) -> None:
    root = write(tmp_path / "run")
    with open_source(root) as by_tracker, open_source(root / "iter_0000003") as by_name:
        assert by_tracker.kind == "megatron"
        assert by_tracker.facts["step"] == "3"
        assert by_tracker.entries == by_name.entries
        assert by_tracker.entries["model.model.layers.0.mlp.up_proj.weight"].shape == (5, 4)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def test_what_is_pickled_beside_the_weights_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_source(write(tmp_path / "run", content={"rng_state": Trap()})) as source:
        assert source.entries
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({"tensor_model_parallel_size": 2}, ["mp_rank_01"]),
        ({"pipeline_model_parallel_size": 2}, ["mp_rank_00_000"]),
        ({"rotary_percent": 0.5}, ["rotary_percent 0.5", 1.0]),
        ({"apply_layernorm_1p": True}, ["apply_layernorm_1p True", False]),
        ({"num_attention_heads": None}, ["num_attention_heads"]),
        ({"untie_embeddings_and_output_weights": True}, ["output_layer.weight"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(tmp_path: Path, args: dict[str, Any], names: list[object]) -> None:
    with refused(CheckpointError, tmp_path / "run" / "iter_0000003", *names):
        open_source(write(tmp_path / "run", args=args))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"args": None}, "`args`"),
        ({"model": {"language_model": {}}}, "tools/checkpoint/convert.py"),
        ({"model": {"decoder.layers.0.odd.weight": torch.ones(2)}}, "embedding.word_embeddings.weight"),
        ({"model": None}, "`model`"),
    ],
    ids=["no args", "old", "other", "none"],
)
def test_contents_that_do_not_fit_are_named(tmp_path: Path, content: dict[str, Any], name: str) -> None:
    with refused(CheckpointError, tmp_path / "run" / "iter_0000003", name):
        open_source(write(tmp_path / "run", content=content))


def test_a_tensor_that_nobody_has_a_place_for_is_named(tmp_path: Path) -> None:
    model = {name: torch.randn(shape) for name, shape in MODEL.items()}
    model[f"{LAYER}mlp.shared_experts.linear_fc1.weight"] = torch.ones(2, 2)
    with refused(CheckpointError, f"{LAYER}mlp.shared_experts.linear_fc1.weight"):
        open_source(write(tmp_path / "run", content={"model": model}))


def test_an_iteration_that_is_not_there_is_named(tmp_path: Path) -> None:
    root = write(tmp_path / "run")
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    with refused(CheckpointError, root / "latest_checkpointed_iteration.txt", "release"):
        open_source(root)


def test_a_format_that_cannot_be_read_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with refused(CheckpointError, tmp_path, "'zarr'", "--ckpt-format torch_dist"):
        open_source(tmp_path)
