"""Configuration files with bases, and changes from the command line."""

from __future__ import annotations

import random
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.errors import ConfigError
from plait.frontends.mmengine import Config, DictAction


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)


def test_a_file_is_put_over_its_bases(tmp_path: Path) -> None:
    width = random.randint(2, 99)
    write(
        tmp_path,
        model="model = dict(type='Net', width=8, head=dict(classes=10, bias=True))\n",
        schedule="lr = 0.1\noptim_wrapper = dict(optimizer=dict(type='SGD', lr=lr, momentum=0.9))\n",
        run=(
            "import math\n"
            "_base_ = ['./model.py', 'schedule.py']\n"
            f"model = dict(width={width}, head=dict(_delete_=True, classes=3))\n"
            "rounds = int(math.sqrt(16))\n"
            "half = _base_.lr / 2\n"
            "old = {{_base_.model.width}}\n"
            "name = '{{fileBasenameNoExtension}}'\n"
        ),
    )
    found = Config.fromfile(tmp_path / "run.py")
    assert found.model.to_dict() == {"type": "Net", "width": width, "head": {"classes": 3}}
    assert found.optim_wrapper.optimizer.momentum == 0.9
    assert (found.rounds, found.half, found.old, found["name"]) == (4, 0.05, 8, "run")
    assert "math" not in found
    assert Config.fromfile(_dumped(found, tmp_path)).to_dict() == found.to_dict()


def _dumped(config: Config, folder: Path) -> Path:
    config.dump(folder / "again.py")
    return folder / "again.py"


@pytest.mark.parametrize(
    ("files", "key", "names"),
    [
        ({"run": "_base_ = 'gone.py'"}, "_base_", ["run.py", "gone.py"]),
        ({"run": "_base_ = 'run.py'"}, "_base_", ["run.py → run.py"]),
        ({"run": "a = b"}, "config", ["run.py", "NameError", "'b'"]),
        ({"run": "a = ("}, "config", ["run.py", 1, "'('"]),
        (
            {"one": "a = 1", "two": "a = 2", "run": "_base_ = ['one.py', 'two.py']"},
            "_base_",
            ["`a`", "two.py", "run.py"],
        ),
        ({"one": "a = 1", "run": "_base_ = 'one.py'\na = dict(b=1)"}, "a", [1, "_delete_=True"]),
        ({"run": "a = '{{$HOME:}}'"}, "config", ["run.py", "'HOME'", "--cfg-options"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    tmp_path: Path, files: dict[str, str], key: str, names: list[object]
) -> None:
    write(tmp_path, **files)
    with refused(ConfigError, *names, key=key):
        Config.fromfile(tmp_path / "run.py")


def test_options_of_the_command_line_are_dotted_paths_and_python_values() -> None:
    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="+", action=DictAction)
    words = ["a.b=1e-3", "a.c=true", "l=1,2", "t=(1,x)", "s=text", "n=None", "hooks.0.interval=5", "q=[[1,2],[3]]"]
    options = parser.parse_args(["--cfg-options", *words]).cfg_options
    config = Config({"a": {"b": 1, "d": 2}, "hooks": [{"interval": 1}, {}]})
    config.merge_from_dict(options)
    expected: dict[str, Any] = {
        "a": {"b": 1e-3, "c": True, "d": 2},
        "hooks": [{"interval": 5}, {}],
        "l": [1, 2],
        "t": (1, "x"),
        "s": "text",
        "n": None,
        "q": [[1, 2], [3]],
    }
    assert config.to_dict() == expected
    with refused(ConfigError, 2, key="hooks.7"):
        config.merge_from_dict({"hooks.7.interval": 1})


def test_yaml_and_json_files_have_bases_too(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"a": {"b": 1, "c": 2}}')
    (tmp_path / "run.yaml").write_text("_base_: base.json\na:\n  c: 3\n")
    assert Config.fromfile(tmp_path / "run.yaml").a == {"b": 1, "c": 3}


def test_a_missing_key_is_an_error_that_names_the_nearest() -> None:
    with refused(AttributeError, "'modle'", "`model`"):
        _ = Config({"model": 1}).modle
