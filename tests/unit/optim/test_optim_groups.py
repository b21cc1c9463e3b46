"""Which parameters end up in which group."""

from __future__ import annotations

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait.config.optim import AdamWConfig, MuonConfig, SGDConfig
from plait.errors import ConfigError, ModelError
from plait.optim import parameter_infos, split_groups


class ScaleNorm(nn.Module):
    """A normalisation that torch does not know."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.other_norm = ScaleNorm(6)
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.stack = nn.Parameter(torch.zeros(2, 6, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def names_by_decay(config: AdamWConfig | SGDConfig, model: nn.Module) -> dict[float, set[str]]:
    return {group.options["weight_decay"]: set(group.names) for group in split_groups(model, config)}


def test_biases_and_norms_of_any_make_are_spared_by_default() -> None:
    groups = names_by_decay(AdamWConfig(weight_decay=0.1), Net())
    assert groups[0.1] == {"embed.weight", "layer.weight", "conv.weight", "stack"}
    assert groups[0.0] == {
        "layer.bias",
        "norm.weight",
        "norm.bias",
        "other_norm.gain",
        "conv.bias",
        "batch_norm.weight",
        "batch_norm.bias",
    }


def test_a_tied_parameter_appears_once_and_answers_to_all_its_names() -> None:
    infos = {info.name: info for info in parameter_infos(Net())}
    assert infos["embed.weight"].aliases == ("head.weight",)
    assert "head.weight" not in infos
    assert names_by_decay(AdamWConfig(no_decay=("head.*",)), Net())[0.0] == {"embed.weight"}
    assert names_by_decay(AdamWConfig(no_decay=("embedding",)), Net())[0.0] == {"embed.weight"}


def test_the_order_is_that_of_named_parameters() -> None:
    model = Net()
    assert [info.name for info in parameter_infos(model)] == [name for name, _ in model.named_parameters()]


def test_frozen_parameters_are_in_no_group() -> None:
    model = Net()
    model.embed.weight.requires_grad_(False)
    names = {name for group in split_groups(model, AdamWConfig()) for name in group.names}
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with refused(ModelError, "requires_grad=False"):
        split_groups(Net().requires_grad_(False), AdamWConfig())


def test_without_weight_decay_there_is_one_group() -> None:
    (group,) = split_groups(Net(), SGDConfig())
    assert group.options == {"weight_decay": 0.0}


def test_patterns_that_fit_nothing_are_all_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        split_groups(Net(), AdamWConfig(no_decay=("bias", "*.gate.*", "layr.*")))
    assert [problem.path for problem in caught.value.problems] == ["optim.no_decay"] * 2
    assert "'layr.*'" in str(caught.value)


def test_a_pattern_may_fit_frozen_parameters_only() -> None:
    model = Net()
    model.stack.requires_grad_(False)
    split_groups(model, AdamWConfig(no_decay=("stack",)))


def test_a_builtin_word_may_fit_nothing() -> None:
    (group,) = split_groups(nn.Linear(2, 2, bias=False), AdamWConfig(no_decay=("bias", "norm", "embedding")))
    assert group.names == ("weight",)


def test_muon_takes_hidden_matrices_and_convolutions_and_adamw_the_rest() -> None:
    config = MuonConfig(lr=0.02, adam_lr=0.001, weight_decay=0.1)
    groups = split_groups(Net(), config)
    seen = {
        (group.options["algorithm"], group.options["lr"], group.options["weight_decay"]): set(group.names)
        for group in groups
    }
    assert seen[("muon", 0.02, 0.1)] == {"layer.weight", "conv.weight"}
    assert seen[("adamw", 0.001, 0.1)] == {"embed.weight", "stack"}
    assert {"layer.bias", "norm.weight"} <= seen[("adamw", 0.001, 0.0)]
    assert sum(len(group.names) for group in groups) == len(list(Net().parameters()))


def test_muon_without_any_matrix_is_refused() -> None:
    with refused(ConfigError, "['*']", "Muon", key="optim.adam_patterns"):
        split_groups(Net(), MuonConfig(adam_patterns=("*",)))
