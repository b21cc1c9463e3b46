"""Parts of one's own in a run description: by name, by object, with arguments."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import refused

import plait
from plait import plugins
from plait.checkpoint.convert.conversion import FORMATS, WRITERS
from plait.checkpoint.convert.detect import OPENERS, open_source
from plait.config import ENGINES, CustomEngine, CustomSink, ImportedPart, load_code, parse, parse_sections
from plait.config.base import Section
from plait.config.optim import AdamWConfig, CustomOptim
from plait.config.part import CustomPart, GivenName
from plait.config.posttrain import CustomReward
from plait.config.run import RunConfig
from plait.config.schema import custom_section, items, literals, sections
from plait.config.show import to_dict
from plait.config.strategy import CustomRecompute
from plait.config.trust import entry_points_of
from plait.distributed.activation_checkpointing import POLICIES
from plait.errors import ConfigError
from plait.launch.options import LAUNCHERS
from plait.launch.prepare import STARTERS, find_starter
from plait.monitor.sinks import _SINKS as OWN_SINKS
from plait.posttrain.rl.rewards import REWARDS


def optim(value: Any) -> Any:
    return parse_sections(optim=value).config.optim


def test_a_name_with_a_colon_is_a_part_and_other_keys_are_its_arguments() -> None:
    part = optim({"type": "my.module:SOAP", "lr": 3e-3, "betas": [0.9, 0.95], "inner": {"rank": 4}})
    assert isinstance(part, CustomOptim)
    assert (part.type, part.lr) == ("my.module:SOAP", 3e-3)
    assert part.arguments == {"betas": [0.9, 0.95], "inner": {"rank": 4}}


def test_a_word_alone_is_the_type_of_ones_own_and_of_plaits() -> None:
    assert optim("my.module:SOAP").type == "my.module:SOAP"
    assert optim("AdamW") == AdamWConfig()


def test_arguments_are_overridden_and_written_like_other_keys() -> None:
    parsed = parse({"optim": {"type": "my.module:SOAP", "rank": 4}}, ["optim.rank=8", "optim.inner.eps=1"])
    assert parsed.config.optim.arguments == {"rank": 8, "inner": {"eps": 1}}  # type: ignore[union-attr]
    assert parsed.origins["optim.rank"] == "override"
    assert parse(to_dict(parsed.config)).config == parsed.config


def test_a_class_that_a_name_leads_to_is_written_by_that_name() -> None:
    part = optim(torch.optim.NAdam)
    assert part.given is torch.optim.NAdam
    written = to_dict(parse_sections(optim=torch.optim.NAdam).config)["optim"]["type"]
    assert written == "torch.optim.nadam:NAdam"
    assert type(written) is str


def test_an_object_without_a_name_must_be_given_again() -> None:
    given = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    config = parse_sections(optim=given).config
    assert config.optim.given is given  # type: ignore[union-attr]
    assert copy.deepcopy(config).optim.given is given  # type: ignore[union-attr]
    with pytest.raises(ConfigError) as caught:
        parse(to_dict(config))
    assert caught.value.problems[0].path == "optim.type"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("AdamV", "optim"),
        ({"type": "AdamV"}, "optim.type"),
        ({"type": "AdamW", "betaz": 1}, "optim.betaz"),
        ({"type": "my.module:SOAP", "lr": "fast"}, "optim.lr"),
        (3, "optim"),
    ],
)
def test_what_is_neither_a_word_nor_a_part_is_refused_at_its_key(value: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        optim(value)
    assert [problem.path for problem in caught.value.problems] == [path]


def open_unions(section: type[Section]) -> Iterator[Any]:
    for info in section.model_fields.values():
        if custom_section(info.annotation) is not None:
            yield info.annotation
        for each in items(info.annotation):
            if custom_section(each) is not None:
                yield each
        for inner in sections(info.annotation).values():
            yield from open_unions(inner)


def test_the_words_that_a_part_knows_as_plaits_are_those_of_the_schema() -> None:
    seen: dict[Any, set[str]] = {}
    for annotation in open_unions(RunConfig):
        part = custom_section(annotation)
        seen.setdefault(part, set()).update([*sections(annotation), *map(str, literals(annotation))])
    assert {part.plugin_kind for part in seen} >= {"optimizer", "schedule", "model", "data", "hook", "sink", "engine"}
    for part, words in seen.items():
        assert words == set(part.builtin), part


def test_plaits_own_parts_come_in_by_the_same_door() -> None:
    described = {
        found
        for annotation in open_unions(RunConfig)
        for found in sections(annotation).values()
        if not issubclass(found, (CustomPart, ImportedPart))
    }
    assert len(described) > 30
    assert {found.__name__ for found in described if not callable(load_code(found.builds, key=found.__name__))} == set()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (ENGINES, CustomEngine.builtin),
        (OWN_SINKS, CustomSink.builtin),
        (REWARDS, CustomReward.builtin),
        (POLICIES, CustomRecompute.builtin),
        (STARTERS, set(LAUNCHERS) - {"local", "ssh"}),
        (WRITERS, FORMATS),
        (OPENERS, OPENERS),
    ],
    ids=["engine", "sink", "reward", "recompute", "launcher", "converter to", "converter from"],
)
def test_every_word_of_plaits_leads_to_what_it_stands_for(table: Any, words: Any) -> None:
    assert set(table) == set(words)
    names = [each if isinstance(each, str) else each.builds for each in table.values()]
    assert all(callable(load_code(name, key="a test")) for name in names)


def test_a_run_of_plaits_own_parts_looks_for_no_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what every installed package declares takes longer than the rest of a parse."""
    looked_for: list[str] = []
    monkeypatch.setattr("plait.config.part.entry_points_of", lambda kind: looked_for.append(kind) or {})
    parse_sections(
        model={"type": "gpt"},
        data={"type": "tokens", "path": "x"},
        optim="SGD",
        schedule={"type": "WSD", "decay": 3},
        hooks=[{"type": "ema"}],
        metrics=["accuracy"],
        strategy={"recompute": "full", "pipeline": {"schedule": "zbv"}},
        log={"sinks": ["jsonl"]},
    )
    assert looked_for == []


def test_a_copy_for_another_process_keeps_the_name_alone() -> None:
    import pickle

    name = GivenName(lambda: None)
    assert type(pickle.loads(pickle.dumps(name))) is str


# ---- every form of a part: a name that leads to it, a plug-in's name, the object itself, each alone or as `type`

POINTS = """
[plait.recompute]
every-second = parts_of_mine:every_second
[plait.pipeline_schedule]
one-by-one = parts_of_mine:one_by_one
[plait.tensor_plan]
my-plan = parts_of_mine:plan
[plait.precision]
rounded = parts_of_mine:rounded
[plait.reward]
my-reward = parts_of_mine:reward
[plait.storage]
my-store = parts_of_mine:Store
[plait.collate]
pad = parts_of_mine:pad
[plait.launcher]
my-launcher = parts_of_mine:start
[plait.converter]
my-reader = parts_of_mine:read
[plait.algorithm]
mine = parts_of_mine:start
[plait.environment]
mine = parts_of_mine:start
"""
PARTS_OF_MINE = """
import torch
from plait.launch import Command

def every_second(name, module): return True
def one_by_one(ranks, micro_batches): return []
def plan(model): return {}
def rounded(blocks, *, device): return []
def reward(prompt, answer, right): return 1.0
def pad(samples): return samples
def start(job, arguments): return Command(("started", *arguments))
def read(path): return {"weight": torch.ones(2)}

class Store:
    def write(self, name, source): ...
    def read(self, name, target): ...
    def names(self, prefix): return []
    def delete(self, name): ...
"""
OPEN: dict[str, tuple[str, str, Callable[[Any], dict[str, Any]]]] = {
    "strategy.recompute": ("every-second", "every_second", lambda part: {"strategy": {"recompute": part}}),
    "strategy.recompute.mode": (
        "every-second",
        "every_second",
        lambda part: {"strategy": {"recompute": {"mode": part}}},
    ),
    "strategy.pipeline.schedule": (
        "one-by-one",
        "one_by_one",
        lambda part: {"strategy": {"pipeline": {"schedule": part}}},
    ),
    "strategy.tensor.plan": ("my-plan", "plan", lambda part: {"strategy": {"tensor": {"plan": part}}}),
    "precision.recipe": ("rounded", "rounded", lambda part: {"precision": {"recipe": part}}),
    "grpo.reward": ("my-reward", "reward", lambda part: {"phase": "grpo", "grpo": {"reward": part}}),
    "checkpoint.storage": ("my-store", "Store", lambda part: {"checkpoint": {"storage": part}}),
    "data.collate": ("pad", "pad", lambda part: {"data": {"type": "tokens", "path": "x", "collate": part}}),
}
"""Key, name of the plug-in, name in its module, and a run description that has it."""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "parts_of_mine.py").write_text(PARTS_OF_MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points_of.cache_clear()
    yield import_module("parts_of_mine")
    entry_points_of.cache_clear()
    sys.modules.pop("parts_of_mine", None)


@pytest.mark.parametrize("form", ["name", "plug-in", "object"])
@pytest.mark.parametrize(
    ("key", "wrapped"),
    # `recompute` is a section whose short word is its mode.
    [(key, wrapped) for key in OPEN for wrapped in (False, True) if key != "strategy.recompute" or not wrapped],
)
def test_each_form_of_a_part_leads_to_it(mine: Any, key: str, wrapped: bool, form: str) -> None:
    plugin, name, describe = OPEN[key]
    found = getattr(mine, name)
    part: Any = {"name": f"parts_of_mine:{name}", "plug-in": plugin, "object": found}[form]
    section: Any = parse_sections(**describe({"type": part} if wrapped else part)).config
    for attribute in key.replace("recompute.mode", "recompute").split("."):
        section = getattr(section, attribute)
    section = section.mode if "recompute" in key else section
    assert plugins.load(section, key) is found


def test_section_objects_take_parts(mine: Any) -> None:
    made = [
        plait.Strategy(engine=plait.part("my:Engine", bucket_mb=3)).engine,
        plait.Recompute(mode=plait.part(mine.every_second)).mode,
        plait.PipelineParallel(schedule=plait.part("one-by-one")).schedule,
        plait.TensorParallel(plan=plait.part("my:plan")).plan,
        plait.Precision(recipe=plait.part("my:recipe", steps=4)).recipe,
        plait.Log(sinks=("jsonl", plait.part(mine.Store))).sinks[1],
        plait.Train(loss=plait.part(mine.pad)).loss,
        plait.Checkpoint(storage=plait.part("my-store", url="x")).storage,
        plait.TextData(path="x", seq_len=8, collate=plait.part(mine.pad)).collate,
        plait.Grpo(reward=plait.part(mine.reward)).reward,
    ]
    assert [type(each) for each in made if not isinstance(each, CustomPart)] == []
    parts: list[Any] = made
    assert [parts[0].arguments, parts[4].arguments, parts[7].arguments] == [
        {"bucket_mb": 3},
        {"steps": 4},
        {"url": "x"},
    ]
    assert [parts[1].given, parts[6].given] == [mine.every_second, mine.pad]


def test_a_part_is_what_a_mapping_says() -> None:
    assert plait.part("my:SOAP", lr=1e-3) == {"type": "my:SOAP", "lr": 1e-3}
    with refused(ConfigError, "my:SOAP", "'x'", key="type"):
        plait.part("my:SOAP", type="x")


def test_an_object_that_is_made_already_is_a_storage(mine: Any) -> None:
    made = mine.Store()
    for part in (made, {"type": made}):
        section: Any = parse_sections(checkpoint={"storage": part}).config.checkpoint.storage
        assert plugins.load(section, "checkpoint.storage") is made


@pytest.mark.parametrize("name", ["my-launcher", "parts_of_mine:start"])
def test_a_launcher_is_found_by_either_name(mine: Any, name: str) -> None:
    job: Any = None
    assert find_starter(name)(job, ["-v"]).argv == ("started", "-v")


@pytest.mark.parametrize("name", ["my-reader", "parts_of_mine:read"])
def test_a_reader_is_found_by_either_name(mine: Any, tmp_path: Path, name: str) -> None:
    assert open_source(tmp_path, name).read("model.weight").tolist() == [1, 1]


def test_a_kind_that_nothing_uses_yet_is_listed_with_that(mine: Any) -> None:
    mine_only = [plugin for plugin in plugins.installed_plugins() if plugin.package == "mine 1.0"]
    problems = {(plugin.kind, plugin.name): plugin.problem for plugin in mine_only}
    assert {kind for (kind, _), problem in problems.items() if problem} == {"algorithm", "environment"}
    assert len(problems) == POINTS.count(" = ")
