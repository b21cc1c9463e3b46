"""Parts of one's own in a run description: by name, by object, with arguments."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from plait.config import parse, parse_sections
from plait.config.base import Section
from plait.config.optim import AdamWConfig, OptimPart
from plait.config.part import GivenName
from plait.config.run import RunConfig
from plait.config.show import to_dict
from plait.config.tree import items, literals, open_part, sections
from plait.errors import ConfigError


def optim(value: Any) -> Any:
    return parse_sections(optim=value).config.optim


def test_a_name_with_a_colon_is_a_part_and_other_keys_are_its_arguments() -> None:
    part = optim({"type": "my.module:SOAP", "lr": 3e-3, "betas": [0.9, 0.95], "inner": {"rank": 4}})
    assert isinstance(part, OptimPart)
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
        if open_part(info.annotation) is not None:
            yield info.annotation
        for each in items(info.annotation):
            if open_part(each) is not None:
                yield each
        for inner in sections(info.annotation).values():
            yield from open_unions(inner)


def test_the_words_that_a_part_knows_as_plaits_are_those_of_the_schema() -> None:
    seen: dict[Any, set[str]] = {}
    for annotation in open_unions(RunConfig):
        part = open_part(annotation)
        seen.setdefault(part, set()).update([*sections(annotation), *map(str, literals(annotation))])
    assert {part.kind for part in seen} >= {"optimizer", "schedule", "model", "data", "hook", "sink", "engine"}
    for part, words in seen.items():
        assert words == set(part.own), part


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
