"""From the `data` section to a data set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.refusals import refused

from plait import data as room
from plait.config.data import DataConfig, ImportedData, TextData, TokensData
from plait.data import PackedTokens, TokenWriter, build_dataset, prepare, tokenizer_path
from plait.errors import ConfigError


def test_a_token_file_is_packed_as_its_section_says(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add([1, 2, 3, 4, 5])
    config: DataConfig = TypeAdapter(DataConfig).validate_python(
        {"type": "tokens", "path": str(tmp_path / "c"), "seq_len": 2, "document_mask": False}
    )
    dataset = build_dataset(config, training=True, seed=0)
    assert isinstance(dataset, PackedTokens)
    assert [sorted(dataset[i]) for i in range(len(dataset))] == [["input_ids", "labels"]] * 2


def test_preparing_does_the_work_that_building_then_finds_done(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 40)
    config = TextData(path=str(tmp_path / "a.txt"), vocab_size=257, seq_len=8, cache=str(tmp_path / "cache"))
    prepare(config)
    (entry,) = (tmp_path / "cache").iterdir()
    assert tokenizer_path(config) == entry / "tokenizer.json"
    assert build_dataset(config, training=True, seed=0).tokens.path == entry / "tokens"
    assert tokenizer_path(TokensData(path="somewhere")) is None
    assert tokenizer_path(None) is None


def test_a_data_set_of_the_users_own_is_imported_and_called() -> None:
    dataset = build_dataset(ImportedData(target="collections:Counter", args={"x": 3}), training=True, seed=0)
    assert dataset["x"] == 3


@pytest.mark.parametrize(
    ("target", "args", "key"),
    [
        ("os:getcwd", {}, "val_data.target"),
        ("fractions:Fraction", {}, "val_data.target"),
        ("collections:UserList", {"wide": 3}, "val_data.args.wide"),
    ],
)
def test_what_makes_no_data_set_is_refused_by_key(target: str, args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_dataset(ImportedData(target=target, args=args), training=True, seed=0, role="val_data")
    assert [problem.path for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("no_such_module_anywhere:f", "no_such_module_anywhere"),
        ("math:no_such_name", "no_such_name"),
    ],
)
def test_a_target_that_cannot_be_found_is_named(target: str, name: str) -> None:
    with refused(ConfigError, repr(target), repr(name), key="val_data.target"):
        build_dataset(ImportedData(target=target), training=True, seed=0, role="val_data")


def test_the_exported_names_exist_and_are_sorted() -> None:
    assert room.__all__ == sorted(room.__all__)
    assert all(hasattr(room, name) for name in room.__all__)


def test_the_room_is_entered_without_image_or_tokenizer_libraries() -> None:
    code = "import sys, plait.data; print([m for m in ('PIL', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
