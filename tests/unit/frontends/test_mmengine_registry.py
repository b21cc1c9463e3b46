"""Registries: names, unknown names, unknown keys."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.refusals import refused
from torch import nn

from plait.errors import ConfigError
from plait.frontends.mmengine.registry import Registry


class Block:
    def __init__(self, width: int, depth: int = 1) -> None:
        self.width, self.depth = width, depth


def test_a_registered_class_is_built_from_its_name_and_options() -> None:
    registry = Registry("model")
    registry.register_module(name=["Block", "Brick"], module=Block)
    built = registry.build({"type": "Brick", "width": 3}, default_args={"depth": 2, "unheard": 1})
    assert (built.width, built.depth) == (3, 2)
    assert registry.build(built) is built
    assert registry.build({"type": Block, "width": 1}).width == 1
    assert isinstance(registry.build({"type": "torch.nn.Linear", "in_features": 2, "out_features": 1}), nn.Linear)


def test_the_decorator_goes_with_and_without_parentheses() -> None:
    registry = Registry("model")

    @registry.register_module()
    class One:
        pass

    @registry.register_module
    class Two:
        pass

    assert list(registry) == ["One", "Two"]
    with refused(ConfigError, "'One'", "force=True", key="model"):
        registry.register_module(name="One", module=Two)
    registry.register_module(name="One", force=True, module=Two)
    assert registry.get("One") is Two


@pytest.mark.parametrize(
    ("description", "key", "names"),
    [
        ({"type": "Blok", "width": 1}, "model.type", ["'Blok'", "`Block`"]),
        ({"type": "Block", "widht": 1}, "model.Block.widht", ["`width`"]),
        ({"width": 1}, "model", ["{'width': 1}", "`type`"]),
    ],
)
def test_what_is_misspelt_is_an_error_with_a_suggestion(
    description: dict[str, Any], key: str, names: list[str]
) -> None:
    registry = Registry("model")
    registry.register_module(module=Block)
    with refused(ConfigError, *names, key=key):
        registry.build(description)


def test_names_of_a_loaded_mmengine_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = SimpleNamespace(MODELS=SimpleNamespace(get={"Theirs": Block}.get))
    monkeypatch.setitem(sys.modules, "mmengine.registry", theirs)
    assert Registry("model", root="MODELS").get("Theirs") is Block
    assert Registry("model").find("Theirs") is None
