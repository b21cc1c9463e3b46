"""Names that become code: the user's own are imported, those that came with a stored file are refused."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config import parse, parse_stored
from plait.config.show import rows
from plait.config.trust import StoredName, code_keys, load_code, load_module, transformers_code
from plait.errors import ConfigError

EVIL = {"type": "import", "target": "os:system", "args": {"command": "true"}}
DESCRIPTION: dict[str, Any] = {
    "model": EVIL,
    "data": {"type": "mixture", "sources": [EVIL, EVIL]},
    "val_data": EVIL,
    "hooks": [EVIL],
    "grpo": {"reward": "os:system"},
    "ppo": {"reward": "os:system"},
}


def names(config: Any) -> dict[str, str]:
    return {
        "model.target": config.model.target,
        "data.sources.1.target": config.data.sources[1].target,
        "val_data.target": config.val_data.target,
        "hooks.0.target": config.hooks[0].target,
        "grpo.reward.type": config.grpo.reward.type,
        "ppo.reward.type": config.ppo.reward.type,
    }


def test_a_name_of_the_users_own_is_imported() -> None:
    assert load_code("pathlib:Path", key="model.target") is Path
    assert load_code("pathlib:Path.cwd", key="model.target")() == Path.cwd()
    assert load_module("pathlib", key="custom_imports").Path is Path


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("no_such_module:f", ["'no_such_module'"]),
        ("pathlib:Pat", ["Path"]),
        ("pathlib", ["package.module:name"]),
        ("needs_another:f", ["'needs_another'", "not_there_at_all"]),
        ("raises_at_import:f", ["ZeroDivisionError", "raises_at_import.py, line 2"]),
        ("no_python:f", ["SyntaxError"]),
    ],
)
def test_a_name_that_cannot_be_imported_says_why(
    name: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_another.py").write_text("import not_there_at_all\n", encoding="utf-8")
    (tmp_path / "raises_at_import.py").write_text("\n1 / 0\n", encoding="utf-8")
    (tmp_path / "no_python.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with refused(ConfigError, *names, key="model.target"):
        load_code(name, key="model.target")


def test_every_name_of_a_stored_description_is_refused_with_its_file() -> None:
    config = parse_stored(DESCRIPTION, "runs/x/manifest.json", trust_code=False)
    for key, name in names(config).items():
        with refused(ConfigError, "'os:system'", "runs/x/manifest.json", "--trust-code", key=key):
            load_code(name, key=key)


PARTS = {
    "model.type": {"model": "os:system"},
    "data.collate.type": {"data": {"type": "tokens", "path": "x", "collate": "os:system"}},
    "test_data.sources.1.type": {"test_data": {"type": "mixture", "sources": ["os:path", "os:system"]}},
    "train.loss.type": {"train": {"loss": {"type": "os:system"}}},
    "log.sinks.1.type": {"log": {"sinks": ["jsonl", "os:system"]}},
    "hooks.0.type": {"hooks": [{"type": "os:system", "command": "true"}]},
    "metrics.0.type": {"metrics": ["os:system"]},
    "grpo.reward.type": {"grpo": {"reward": {"type": "os:system"}}},
    "optim.type": {"optim": {"type": "os:system"}},
    "schedule.type": {"schedule": {"type": "os:system"}},
    "strategy.engine.type": {"strategy": {"engine": "os:system"}},
    "checkpoint.storage.type": {"checkpoint": {"storage": "os:system"}},
    "precision.recipe.type": {"precision": {"recipe": "os:system"}},
    "strategy.recompute.mode.type": {"strategy": {"recompute": {"mode": "os:system"}}},
    "strategy.pipeline.schedule.type": {"strategy": {"pipeline": {"schedule": "os:system"}}},
    "strategy.tensor.plan.type": {"strategy": {"tensor": {"plan": "os:system"}}},
}


@pytest.mark.parametrize(("key", "content"), PARTS.items())
def test_a_part_of_any_kind_in_the_config_that_a_run_left_is_refused(
    tmp_path: Path, key: str, content: dict[str, Any]
) -> None:
    (tmp_path / "events-rank0.jsonl").touch()
    (tmp_path / "config.yaml").write_text(json.dumps(content), encoding="utf-8")
    with refused(ConfigError, "config.yaml", "'os:system'", key=key):
        parse(tmp_path / "config.yaml")
    assert dict(rows(parse(tmp_path / "config.yaml", ["trust_code=true"]).config))[key] == "os:system"


@pytest.mark.parametrize("key", PARTS)
def test_stored_settings_that_name_a_part_are_known(key: str) -> None:
    found = list(code_keys({"work_dir": "runs/a:b/c", "seed": 3, **PARTS[key]}))
    assert {each.partition(".")[0] for each in found} == {key.partition(".")[0]}


def test_names_of_a_described_run_and_trusted_ones_are_not_refused() -> None:
    for config in (parse(DESCRIPTION).config, parse_stored(DESCRIPTION, "file", trust_code=True)):
        assert not any(isinstance(name, StoredName) for name in names(config).values())


def test_a_stored_file_cannot_vouch_for_itself() -> None:
    config = parse_stored({**DESCRIPTION, "trust_code": True}, "file", trust_code=False)
    assert config.trust_code is False
    assert isinstance(config.model.target, StoredName)  # type: ignore[union-attr]


def test_copies_of_a_stored_name_are_stored_names() -> None:
    config = parse_stored(DESCRIPTION, "file", trust_code=False)
    for made in (
        copy.deepcopy(config),
        config.model_copy(deep=True),
        pickle.loads(pickle.dumps(config)),
        parse(config.model_dump()).config,
        parse({"model": config.model, "grpo": config.grpo, "hooks": config.hooks}).config,
    ):
        for found in (made.model.target, made.grpo.reward.type, made.hooks[0].target):
            assert isinstance(found, StoredName)
            assert found.stored_in == "file"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that somebody has left, or sent."""
    (tmp_path / "events-rank0.jsonl").touch()
    content = {"model": EVIL, "hooks": [EVIL], "trust_code": True}
    (tmp_path / "config.yaml").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_the_config_that_a_run_left_is_a_stored_file(run_folder: Path) -> None:
    with refused(ConfigError, "config.yaml") as caught:
        parse(run_folder / "config.yaml")
    assert [problem.path for problem in caught.value.problems] == ["model.target", "hooks.0.target"]
    own = parse(run_folder / "config.yaml", ["model.target=mine:Net", "hooks=[]"]).config
    assert own.model.target == "mine:Net"  # type: ignore[union-attr]
    assert not isinstance(own.model.target, StoredName)  # type: ignore[union-attr]
    assert not own.trust_code
    trusted = parse(run_folder / "config.yaml", ["trust_code=true"]).config
    assert not isinstance(trusted.model.target, StoredName)  # type: ignore[union-attr]


def test_another_file_is_the_users_own(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "config.yaml").rename(run_folder / "run.yaml")
    assert parse(run_folder / "run.yaml").config.trust_code
    (tmp_path / "elsewhere").mkdir()
    (run_folder / "run.yaml").rename(tmp_path / "elsewhere" / "config.yaml")
    assert parse(tmp_path / "elsewhere" / "config.yaml").config.trust_code


@pytest.mark.parametrize(
    ("key", "content", "name"),
    [
        ("attn_implementation", {"attn_implementation": "them/kernel"}, "them/kernel"),
        ("_attn_implementation_internal", {"_attn_implementation_internal": "them/kernel"}, "them/kernel"),
        (
            "text_config._experts_implementation_internal",
            {"text_config": {"_experts_implementation_internal": {"": "eager", "vision": "them/kernel"}}},
            "them/kernel",
        ),
        ("trust_remote_code", {"model_type": "lightglue", "trust_remote_code": True}, "trust_remote_code"),
        ("inner.0.trust_remote_code", {"inner": [{"trust_remote_code": "yes"}]}, "trust_remote_code"),
    ],
)
def test_a_description_that_has_transformers_run_code_is_refused(
    tmp_path: Path, key: str, content: dict[str, Any], name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with (
        refused(ConfigError, name, f"config.json, {key}", "--trust-code", key="model.path"),
        transformers_code(tmp_path, trust_code=False, key="model.path"),
    ):
        pass
    with transformers_code(tmp_path, trust_code=True, key="model.path") as trusted:
        assert trusted is True


def test_a_description_that_names_no_code_is_not_refused() -> None:
    content = {"attn_implementation": "sdpa", "_attn_implementation_internal": None, "trust_remote_code": False}
    with transformers_code(content, trust_code=False, key="model.config") as trusted:
        assert trusted is False


def test_code_of_an_inner_model_is_refused_before_transformers_asks(tmp_path: Path) -> None:
    content = {"model_type": "llava", "text_config": {"auto_map": {"AutoModel": "them/repo--net.Net"}}}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    for source in (tmp_path, content):
        with (
            refused(ConfigError, "'them/repo--net.Net'", "text_config.auto_map", key="model.path"),
            transformers_code(source, trust_code=False, key="model.path"),
        ):
            pass
        with transformers_code(source, trust_code=True, key="model.path") as trusted:
            assert trusted is True
