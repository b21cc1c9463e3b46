"""Which submodules are handled as one unit."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from plait.config.strategy import WrapConfig
from plait.distributed.wrap import find_wrap_units
from plait.errors import ConfigError


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Model(nn.Module):
    """Three blocks of 76 parameters between an embedding of 36 and a head of 45."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.extra = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 9)


class Declaring(Model):
    block_classes = (Block,)


def names(model: nn.Module, **wrap: Any) -> list[str]:
    return [unit.name for unit in find_wrap_units(model, WrapConfig(**wrap))]


BLOCKS = ["layers.0", "layers.1", "layers.2"]


def test_a_model_that_declares_its_blocks_is_believed() -> None:
    assert names(Declaring()) == BLOCKS


def test_without_a_declaration_repeated_layers_with_parameters_are_units() -> None:
    assert names(Model()) == [*BLOCKS, "extra.0", "extra.2"]


def test_a_model_without_repetition_is_one_unit_with_the_root() -> None:
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))) == []
    assert names(nn.Linear(2, 2)) == []


def test_of_nested_repetitions_the_outer_one_counts() -> None:
    model = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert names(model) == ["0", "1"]


def test_classes_are_chosen_by_name() -> None:
    assert names(Declaring(), classes=["Block", "Embedding"]) == ["embedding", *BLOCKS]


def test_names_are_chosen_by_pattern() -> None:
    assert names(Model(), names=["layers.[02]", "head"]) == ["layers.0", "layers.2", "head"]


def test_a_pattern_that_matches_inner_modules_too_means_the_outer_ones() -> None:
    assert names(Model(), names=["layers.*"]) == BLOCKS
    assert names(Model(), names=["layers*"]) == BLOCKS


def test_classes_and_names_add_up_without_nesting() -> None:
    assert names(Model(), classes=["Block", "Linear"], names=["embedding"]) == [
        "embedding",
        *BLOCKS,
        "extra.0",
        "extra.2",
        "head",
    ]


@pytest.mark.parametrize(
    ("wrap", "path", "told"),
    [
        ({"classes": ["Blok"]}, "strategy.wrap.classes", "Block, Declaring, Embedding"),
        ({"names": ["layer.*"]}, "strategy.wrap.names", "embedding, layers, layers.0"),
        ({"names": ["layers"]}, "strategy.wrap.names", "layers.*"),
        ({"classes": ["ModuleList"]}, "strategy.wrap.classes", "layers.*"),
    ],
)
def test_words_that_choose_nothing_are_refused_with_what_there_is(
    wrap: dict[str, list[str]], path: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        names(Declaring(), **wrap)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert next(iter(wrap.values()))[0] in problem.message or "ModuleList" in problem.message
    assert told in problem.remedy


def test_every_wrong_word_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        names(Model(), classes=["A", "Block"], names=["b", "head"])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("min_params", "expected"),
    [
        (1, ["embedding", *[f"{b}.{k}" for b in BLOCKS for k in ("up", "down")], "extra.0", "extra.2", "head"]),
        (40, [*[f"{b}.up" for b in BLOCKS], "extra", "head"]),  # down has 36, and is left to the block's rest
        (45, ["layers.0", "layers.1", "layers.2", "head"]),
        (46, ["layers.0", "layers.1", "layers.2"]),
        (77, []),
    ],
)
def test_by_size_a_module_is_a_unit_when_what_its_units_leave_is_large_enough(
    min_params: int, expected: list[str]
) -> None:
    assert names(Model(), min_params=min_params) == expected


def test_a_container_is_never_a_unit_by_size() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ParameterList([nn.Parameter(Model().head.weight.detach()) for _ in range(3)])
            self.inner = nn.ModuleDict({"a": Block()})

    assert names(Holder(), min_params=50) == ["inner.a"]
    assert names(Holder(), min_params=80) == []


def test_a_unit_that_shares_a_parameter_with_another_belongs_to_the_root() -> None:
    model = Declaring()
    model.layers[2].up.weight = model.layers[0].up.weight  # type: ignore[union-attr]
    assert names(model) == ["layers.1"]


def test_a_unit_that_shares_a_parameter_with_the_root_belongs_to_it() -> None:
    model = Model()
    model.head.weight = model.embedding.weight
    assert names(model, classes=["Block", "Embedding"]) == BLOCKS


def test_units_that_have_a_module_in_common_belong_to_the_root() -> None:
    model = nn.ModuleList([Block(), Block(), Block()])
    model[2].up = model[0].up
    assert names(model) == ["1"]


def test_a_unit_that_has_a_module_in_common_with_the_root_belongs_to_it() -> None:
    model = Declaring()
    model.last = nn.Sequential(model.layers[0].up)  # type: ignore[arg-type,union-attr]
    assert names(model) == ["layers.1", "layers.2"]


def test_a_parameter_with_two_names_inside_one_unit_is_no_obstacle() -> None:
    model = Declaring()
    block: Any = model.layers[1]
    block.again = block.up
    block.alias = nn.Linear(4, 8)
    block.alias.weight = block.up.weight
    assert names(model) == BLOCKS


def test_one_module_under_two_names_is_one_unit() -> None:
    shared = Block()
    model = nn.ModuleList([shared, Block(), shared])
    assert names(model) == ["0", "1"]
