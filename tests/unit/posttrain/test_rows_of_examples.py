"""Rows as other libraries write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.config.posttrain import FileData
from plait.errors import DataError
from plait.posttrain.data.records import IncompleteError, examples_in
from plait.posttrain.data.rows import read_rows


def test_a_file_that_is_one_list_is_read_entry_by_entry(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n  {"prompt": "q", "response": "a"},\n 7, {"prompt": "\\ud83d"}]\n')
    (first, row), (second, wrong), (_, half) = read_rows(str(file))
    assert (first, second) == (f"{file}, entry 1", f"{file}, entry 2")
    assert row == {"prompt": "q", "response": "a"}
    assert wrong == "expected an object, found a int"
    assert isinstance(half, str)
    file.write_text('[{"prompt": "q"}')
    with pytest.raises(DataError, match=r"rows\.json begins as a list, and is not JSON"):
        list(read_rows(str(file)))


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


USER, BOT = turn("user", "q"), turn("assistant", "a")
LATER = [turn("user", "r"), turn("assistant", "b")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "uq aa"),
        ({"instruction": "q", "input": "", "output": "a"}, "uq aa"),
        ({"instruction": "q", "input": "i", "output": "a"}, "uq\n\ni aa"),
        ({"messages": [turn("user", [{"type": "text", "text": "q"}]), BOT]}, "uq aa"),
        ({"prompt": [USER], "completion": [BOT, *LATER]}, "uq aa ur ab"),
        ({"prompt": "q", "chosen": [USER, BOT, *LATER], "rejected": "no"}, "uq aa ur ab"),
        ({"prompt": "q", "chosen": [turn("system", "s"), USER, BOT]}, "ss uq aa"),
        ({"chosen": [USER, BOT], "rejected": [USER, turn("assistant", "no")]}, "uq aa"),
    ],
)
def test_rows_of_other_libraries_are_whole_conversations(row: dict[str, Any], expected: str) -> None:
    (found,) = examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=False)
    assert " ".join(message.role[0] + message.content for message in found.messages) == expected


def test_the_worse_answer_of_a_pair_may_be_told_with_its_conversation() -> None:
    config, no = FileData(path="rows.jsonl"), turn("assistant", "no")
    for prompt in ({}, {"prompt": "q"}):
        row = {**prompt, "chosen": [USER, BOT, *LATER], "rejected": [USER, BOT, LATER[0], no]}
        (found,) = examples_in(row, config, "row 1", pairs=True)
        assert (found.messages[-1].content, found.rejected, len(found.messages)) == ("b", "no", 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": [USER, BOT, LATER[0]], "rejected": "no"}, "'chosen' does not end with a message"),
        (
            {"prompt": "other", "chosen": [USER, BOT], "rejected": "no"},
            "'chosen' is a conversation that does not begin",
        ),
        ({"chosen": [USER, BOT], "rejected": [LATER[0], BOT]}, "'rejected' is a conversation that does not begin"),
        ({"chosen": [USER, BOT], "rejected": [USER, turn("assistant", "no"), *LATER]}, "'rejected' answers another"),
        ({"chosen": "text alone", "rejected": "no"}, "no 'prompt'; it has 'chosen', 'rejected'"),
        ({"messages": [USER, {**BOT, "tool_calls": [{"name": "f"}]}, BOT]}, "'messages' has calls of tools"),
        ({"messages": [USER, BOT], "tools": [{"name": "f"}]}, "'tools' are described"),
        ({"messages": [turn("user", [{"type": "image"}]), BOT]}, "'content' has a part of type 'image'"),
    ],
)
def test_no_part_of_a_row_is_passed_over(row: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompleteError, match=message):
        list(examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=True))


def test_lines_in_gbk_come_with_the_way_to_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "春眠", "response": "不觉晓"}\n', encoding="gbk")
    ((where, reason),) = read_rows(str(tmp_path / "rows.jsonl"))
    assert where.endswith("line 1")
    assert "iconv -f GB18030 -t UTF-8" in reason


def test_whatever_a_library_raises_of_a_file_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ParquetFile:
        def __init__(self, path: Path) -> None:
            raise OSError("Parquet magic bytes not found in footer")

    monkeypatch.setattr(
        "plait.posttrain.data.rows.import_module", lambda _: type("P", (), {"ParquetFile": ParquetFile})
    )
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read .*magic bytes"):
        list(read_rows(str(tmp_path / "rows.parquet")))
