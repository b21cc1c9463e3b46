from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.refusals import refused
from torch import nn

from plait.errors import ModelError
from plait.models.common.weights import stream_weights, weight_files


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5, bias=False)
        self.outer = nn.Linear(3, 5)
        self.outer.weight = self.inner.weight


def _load(model, folder, **options):
    got = {}
    missing = stream_weights(model, folder, got.__setitem__, translate=lambda n, t: [(n, t)], **options)
    return got, missing


@pytest.mark.parametrize("name", ["inner.weight", "outer.weight"])
def test_either_name_fills_a_tied_parameter(tmp_path, name):
    weight, bias = torch.randn(5, 3), torch.randn(5)
    save_file({name: weight, "outer.bias": bias}, tmp_path / "model.safetensors")
    got, missing = _load(Tied(), tmp_path)
    assert missing == ()
    assert got.keys() == {"inner.weight", "outer.bias"}
    assert torch.equal(got["inner.weight"], weight)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_is_loaded(tmp_path):
    tensors = {"inner.weight": torch.zeros(5, 4), "inner.bais": torch.zeros(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    model, got = Tied(), []
    with refused(ModelError, "inner.weight", "(5, 4)", "(5, 3)", "inner.bais", "outer.bias"):
        stream_weights(model, tmp_path, lambda *a: got.append(a), translate=lambda n, t: [(n, t)])
    assert got == []


def test_what_may_be_missing_is_returned_and_what_may_be_skipped_is(tmp_path):
    save_file({"inner.weight": torch.zeros(5, 3), "old": torch.zeros(1)}, tmp_path / "model.safetensors")
    got, missing = _load(Tied(), tmp_path, may_miss=["bias$"], may_skip=["^old$"])
    assert got.keys() == {"inner.weight"}
    assert missing == ("outer.bias",)


def test_a_folder_without_weights_says_what_was_expected(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with refused(ModelError, tmp_path, "model.safetensors"):
        weight_files(tmp_path)


def test_a_lost_shard_is_named(tmp_path):
    index = {"weight_map": {"inner.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(ModelError, "model-00002-of-00002.safetensors"):
        weight_files(tmp_path)


def test_a_truncated_file_is_named(tmp_path):
    save_file({"inner.weight": torch.zeros(5, 3)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-8])
    with refused(ModelError, tmp_path / "model.safetensors", "header"):
        weight_files(tmp_path)
