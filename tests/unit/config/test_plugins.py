"""Loading and making parts: arguments, failures, plug-ins of installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import missing

from plait import plugins
from plait.config.optim import CustomOptim
from plait.config.part import GivenName
from plait.config.trust import STORED_IN, StoredName, entry_points_of
from plait.errors import ConfigError, Problem


class Thing:
    def __init__(self, params: Any, *, lr: float, rank: int = 1, needed: int = 0) -> None:
        if rank < 0:
            raise ValueError("rank below 0")
        self.given = (params, lr, rank)


def needs(params: Any, *, lr: float, depth: int) -> Thing:
    return Thing(params, lr=lr)


def part(kind: Any, **arguments: Any) -> CustomOptim:
    return CustomOptim(type=kind if isinstance(kind, str) else GivenName(kind), **arguments)


def problem(kind: Any, **arguments: Any) -> Problem:
    with pytest.raises(ConfigError) as caught:
        plugins.build(part(kind, **arguments), "optim", [], lr=1.0, accepts=Thing)
    return caught.value.problems[0]


def test_a_part_is_called_with_what_plait_gives_and_its_own_arguments() -> None:
    assert plugins.build(part(Thing, rank=3), "optim", ["p"], lr=0.5).given == (["p"], 0.5, 3)


def test_an_object_that_is_made_already_is_returned_as_it_is() -> None:
    made = Thing([], lr=1.0)
    assert plugins.build(part(made), "optim", [], lr=0.5, accepts=Thing) is made
    assert problem(made, rank=3).path == "optim.rank"


def test_arguments_that_do_not_fit_are_refused_at_their_key() -> None:
    wrong = problem(Thing, rnak=3)
    assert wrong.path == "optim.rnak"
    assert "rank" in wrong.remedy
    assert problem(needs).remedy.count("optim.depth") == 1
    assert problem(Thing, lr=2.0, rank=-1).path == "optim"
    assert problem(3).path == "optim.type"


def test_what_a_name_leads_to_is_looked_for() -> None:
    assert problem("no_such_module:Thing").path == "optim.type"
    assert problem("collections:Orderd").path == "optim.type"
    assert plugins.load(part("collections:OrderedDict"), "optim").__name__ == "OrderedDict"


def test_a_stored_name_is_not_loaded() -> None:
    section = CustomOptim.model_validate({"type": "os:system"}, context={STORED_IN: "manifest.json"})
    assert isinstance(section.type, StoredName)
    with pytest.raises(ConfigError) as caught:
        plugins.load(section, "optim")
    assert "manifest.json" in str(caught.value)


def install(folder: Path, package: str, points: str, code: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[plait.optimizer]\n{points}\n")
    (folder / f"{package}.py").write_text(code)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path, "good", "mine = good:make\nboth = good:make", "def make(params, *, lr): return ('mine', lr)")
    install(tmp_path, "other", "both = other:make\nbroken = other:make", "raise RuntimeError('no license')")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points_of.cache_clear()
    yield tmp_path
    entry_points_of.cache_clear()
    for name in ("good", "other"):
        sys.modules.pop(name, None)


def test_a_plug_in_is_found_by_its_name(packages: Path) -> None:
    assert plugins.build(part("mine"), "optim", [], lr=0.25) == ("mine", 0.25)
    found = {(each.name, each.package) for each in plugins.installed_plugins()}
    assert found >= {("mine", "good 1.0"), ("broken", "other 1.0")}


def test_a_plug_in_that_raises_is_named_and_the_rest_still_work(packages: Path) -> None:
    broken = problem("broken")
    assert broken.path == "optim.type"
    assert not missing(broken.message, "other 1.0", "no license")
    assert plugins.build(part("mine"), "optim", [], lr=0.25) == ("mine", 0.25)


def test_two_plug_ins_of_one_name_are_refused_with_both(packages: Path) -> None:
    both = problem("both")
    assert "good" in both.message
    assert "other" in both.message


def test_what_is_declared_wrongly_is_listed_with_the_reason(packages: Path) -> None:
    install(packages, "third", "AdamW = third:make", "")
    (packages / "third-1.0.dist-info" / "entry_points.txt").write_text(
        "[plait.optimizer]\nAdamW = third:make\n[plait.optimizers]\nmine = third:make\n"
    )
    entry_points_of.cache_clear()
    problems = {(each.kind, each.name): each.problem for each in plugins.installed_plugins()}
    assert problems["optimizer", "mine"] == ""
    assert all(problems[each] for each in [("optimizer", "both"), ("optimizer", "AdamW"), ("optimizers", "mine")])
