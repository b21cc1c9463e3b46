"""What scripts import from DeepSpeed's modules, and what they find there."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from tests.refusals import refused
from torch import nn

import plait.frontends.deepspeed as deepspeed
from plait.frontends.deepspeed.module_layout import DEEPSPEED

MODULES = {
    "checkpoint.utils": ["clone_tensors_for_torch_save"],
    "moe.utils": ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"],
    "ops.adam": ["DeepSpeedCPUAdam", "FusedAdam"],
    "ops.adam.cpu_adam": ["DeepSpeedCPUAdam"],
    "ops.adam.fused_adam": ["FusedAdam"],
    "runtime.activation_checkpointing.checkpointing": ["checkpoint", "configure", "reset"],
    "runtime.utils": ["see_memory_usage"],
    "runtime.zero": ["GatheredParameters", "ZeroParamStatus"],
    "runtime.zero.partition_parameters": ["ZeroParamStatus", "is_zero_param"],
    "runtime.zero.utils": ["is_zero_param"],
    "utils": ["get_z3_leaf_modules", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"],
    "utils.init_on_device": ["OnDevice"],
    "utils.logging": ["log_dist", "logger"],
    "utils.tensor_fragment": ["safe_get_full_fp32_param", "safe_set_full_optimizer_state"],
    "utils.z3_leaf_module": ["set_z3_leaf_modules"],
}


@pytest.mark.parametrize("module", MODULES)
def test_names_lie_where_deepspeed_has_them(module: str) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    real = importlib.import_module(f"deepspeed.{module}")
    mine = importlib.import_module(f"plait.frontends.deepspeed.{module}")
    assert [name for name in MODULES[module] if not hasattr(mine, name) or not hasattr(real, name)] == []


@pytest.mark.parametrize("path", DEEPSPEED.modules)
def test_a_module_without_a_file_has_the_names_of_its_table(path: str) -> None:
    module = importlib.import_module(f"plait.frontends.deepspeed.{path}")
    names = [name for names in DEEPSPEED.modules[path].values() for name in names]
    assert all(getattr(module, name) is not None for name in names)
    assert set(names) <= set(module.__all__)
    with refused(AttributeError, f"deepspeed.{path}.no_such_name", "docs/deepspeed-api.md"):
        module.no_such_name  # noqa: B018


def test_short_names_are_those_of_the_modules() -> None:
    assert deepspeed.dist is deepspeed.comm
    assert deepspeed.logger is deepspeed.utils.logger
    assert deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint is deepspeed.checkpointing.checkpoint


def test_leaf_modules_are_found_by_class_and_by_name() -> None:
    utils = deepspeed.utils
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    assert utils.set_z3_leaf_modules(model, [nn.Tanh]) == [model[1][1]]
    assert utils.set_z3_leaf_modules(model, ["Linear"]) == [model[0], model[1][0]]
    assert len(utils.get_z3_leaf_modules(model)) == 3
    assert utils.unset_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[1][0]]
    assert utils.get_z3_leaf_modules(model) == [model[1][1]]
    with refused(ValueError, "NoSuch"):
        utils.set_z3_leaf_modules(model, ["NoSuch"])
    assert utils.set_z3_leaf_modules(model, ["NoSuch"], raise_if_not_found=False) == []


def test_memory_is_told_when_forced(capsys: pytest.CaptureFixture[str]) -> None:
    see = deepspeed.runtime.utils.see_memory_usage
    see("before")
    assert capsys.readouterr().out == ""
    see("after", force=True)
    said = capsys.readouterr().out
    assert said.startswith("after\nMA ")
    assert "CPU Virtual Memory:  used = " in said


def test_tensors_to_be_saved_have_storage_of_their_own() -> None:
    whole = torch.arange(100.0)
    part = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [whole[:2]], "b": (whole[3], 4)})
    assert part["a"][0].untyped_storage().nbytes() == 8
    assert part["b"] == (torch.tensor(3.0), 4)


def test_groups_of_models_without_experts_stay() -> None:
    split = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer
    groups = [{"params": [nn.Parameter(torch.ones(1))], "name": "all"}]
    assert split(groups[0]) == split(groups) == groups
