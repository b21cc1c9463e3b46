"""Rows as other libraries write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config.posttrain import FileData, Gsm8kData
from plait.errors import DataError
from plait.posttrain.data.records import IncompleteError, UnlearnedError, examples_in, read_rows


def test_a_file_that_is_one_list_is_read_entry_by_entry(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n  {"prompt": "q", "response": "a"},\n 7, {"prompt": "\\ud83d"}]\n')
    (first, row), (second, wrong), (_, half) = read_rows(str(file))
    assert (first, second) == (f"{file}, entry 1", f"{file}, entry 2")
    assert row == {"prompt": "q", "response": "a"}
    assert "int" in wrong
    assert isinstance(wrong, str)
    assert isinstance(half, str)
    file.write_text('[{"prompt": "q"}')
    with refused(DataError, str(file), "list", "JSON"):
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
    ("row", "names"),
    [
        ({"prompt": "q", "chosen": [USER, BOT, LATER[0]], "rejected": "no"}, ["'chosen'", "assistant"]),
        (
            {"prompt": "other", "chosen": [USER, BOT], "rejected": "no"},
            ["'chosen'", "prompt"],
        ),
        ({"chosen": [USER, BOT], "rejected": [LATER[0], BOT]}, ["'rejected'", "prompt"]),
        (
            {"chosen": [USER, BOT], "rejected": [USER, turn("assistant", "no"), *LATER]},
            ["'rejected'", "3 messages", "1"],
        ),
        ({"chosen": "text alone", "rejected": "no"}, ["'prompt'", "'chosen', 'rejected'"]),
        ({"messages": [USER, {**BOT, "tool_calls": [{"name": "f"}]}, BOT]}, ["'messages'", "tools"]),
        ({"messages": [USER, BOT], "tools": [{"name": "f"}]}, ["'tools'"]),
        ({"messages": [turn("user", [{"type": "image"}]), BOT]}, ["'content'", "'image'"]),
    ],
)
def test_no_part_of_a_row_is_passed_over(row: dict[str, Any], names: list[str]) -> None:
    with refused(IncompleteError, *names):
        list(examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=True))


def test_lines_in_gbk_come_with_the_way_to_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "春眠", "response": "不觉晓"}\n', encoding="gbk")
    ((where, reason),) = read_rows(str(tmp_path / "rows.jsonl"))
    assert where.endswith("line 1")
    assert "iconv -f GB18030 -t UTF-8" in reason


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, {**BOT, "weight": 0}, *LATER]}, [False, True]),
        ({"messages": [USER, {**BOT, "weight": 1}, LATER[0], {**LATER[1], "weight": 0.0}]}, [True, False]),
        ({"messages": [{**USER, "train": False}, {**BOT, "train": False}, *LATER]}, [False, True]),
        ({"messages": [USER, {**BOT, "loss": False}, LATER[0], {**LATER[1], "loss": True}]}, [False, True]),
        ({"messages": [USER, {**BOT, "weight": None}, *LATER]}, [True, True]),
        ({"weight": 1, "prompt": "q", "response": "a"}, [True]),
    ],
)
def test_answers_are_learned_as_their_turns_say(row: dict[str, Any], expected: list[bool]) -> None:
    (found,) = examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=False)
    assert [message.learned for message in found.messages if message.role == "assistant"] == expected


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ({"weight": 0, "prompt": "q", "response": "a"}, ["row", "weight 0"]),
        ({"train": False, "prompt": "q", "response": "a"}, ["row", "weight 0"]),
        ({"messages": [USER, {**BOT, "weight": 0}]}, ["answer", "weight 0"]),
    ],
)
def test_what_is_not_to_be_learned_is_no_example(row: dict[str, Any], names: list[str]) -> None:
    with refused(UnlearnedError, *names):
        list(examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=False))


@pytest.mark.parametrize(
    ("row", "pairs", "names"),
    [
        ({"weight": 0.5, "prompt": "q", "response": "a"}, False, ["'weight'", "0.5"]),
        ({"messages": [USER, {**BOT, "weight": "0"}]}, False, ["'weight'", "'0'"]),
        ({"messages": [USER, {**BOT, "train": 2}]}, False, ["'train'", "2"]),
        ({"messages": [{**USER, "train": True}, BOT]}, False, ["user", "'train'"]),
        ({"messages": [{**USER, "reasoning_content": "h"}, BOT]}, False, ["'reasoning_content'", "user"]),
        ({"messages": [USER, {**BOT, "train_detail": [{}]}]}, False, ["train_detail"]),
        ({"messages": [USER, {"role": "tool", "content": "7"}, BOT]}, False, ["'tool'"]),
        ({"prompt": "q", "response": "a", "images": ["x.png"]}, False, ["'images'"]),
        ({"prompt": "q", "completion": "a", "label": False}, False, ["'label'"]),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5}, True, ["'margin'", "reward.margin"]),
        ({"prompt": "q", "chosen": [{**BOT, "weight": 0}], "rejected": "b"}, True, ["pair", "weight 0"]),
        ({"system": "s", "messages": [turn("system", "t"), USER, BOT]}, False, ["'system'"]),
        ({"instruction": "q", "history": ["x"], "output": "a"}, False, ["'history'", "'x'"]),
    ],
)
def test_keys_that_mean_what_cannot_be_done_are_refused(row: dict[str, Any], pairs: bool, names: list[str]) -> None:
    with refused(IncompleteError, *names):
        list(examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=pairs))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "ss uq aa",
        ),
        ({"system": "s", "instruction": "q", "output": "a", "history": [["x", "y"]]}, "ss ux ay uq aa"),
        ({"messages": [turn("developer", "s"), USER, BOT]}, "ss uq aa"),
    ],
)
def test_what_other_libraries_put_beside_a_conversation_is_part_of_it(row: dict[str, Any], expected: str) -> None:
    (found,) = examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=False)
    assert " ".join(message.role[0] + message.content for message in found.messages) == expected


def test_keys_that_nothing_reads_are_named() -> None:
    row = {"prompt": "q", "id": 7, "answer": "a", "completion": "b", "nothing": None}
    (found,) = examples_in(row, FileData(path="rows.jsonl"), "row 1", pairs=False)
    assert found.unread == ("id", "completion")
    talk = {"messages": [{**USER, "name": "Ann"}, {**BOT, "stars": 5}], "source": "here"}
    (found,) = examples_in(talk, FileData(path="rows.jsonl"), "row 1", pairs=False)
    assert found.unread == ("source", "messages[].name", "messages[].stars")


def test_several_right_solutions_of_a_question_are_one_prompt() -> None:
    solutions = {f"model {i}": {"solution": f"s{i}", "is_correct": i > 0} for i in range(3)}
    row, config = {"question": "q", **solutions}, Gsm8kData(path="rows.jsonl")
    assert len(list(examples_in(row, config, "row 1", pairs=False))) == 2
    assert len(list(examples_in(row, config, "row 1", pairs=False, answered=False))) == 1


def test_a_key_that_stands_twice_is_no_row(tmp_path: Path) -> None:
    twice = '{"prompt": "q", "response": "a", "prompt": "r"}'
    (tmp_path / "rows.jsonl").write_text(twice, encoding="utf-8")
    ((_, reason),) = read_rows(str(tmp_path / "rows.jsonl"))
    assert "'prompt'" in str(reason)
    (tmp_path / "rows.json").write_text(f"[{twice}]", encoding="utf-8")
    with refused(DataError, str(tmp_path / "rows.json"), "'prompt'"):
        list(read_rows(str(tmp_path / "rows.json")))


def test_a_folder_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    row = '{"prompt": "q", "response": "a"}\n'
    hidden = tmp_path / ".ipynb_checkpoints"
    hidden.mkdir()
    for file in (tmp_path / "train-0.jsonl", tmp_path / "train-1.jsonl", hidden / "train-0.jsonl"):
        file.write_text(row, encoding="utf-8")
    assert len(list(read_rows(str(tmp_path)))) == 2
    for name, others in (("train-2.jsonl.gz", []), ("test-0.jsonl", ["train-1"])):
        (tmp_path / name).write_text(row, encoding="utf-8")
        with refused(DataError, str(tmp_path), name, *others):
            list(read_rows(str(tmp_path)))
        (tmp_path / name).unlink()


def test_splits_of_a_saved_data_set_are_named_one_by_one(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list([{"prompt": "q", "response": "a"}])
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "both"))
    with refused(DataError, str(tmp_path / "both" / "train"), "train, test"):
        list(read_rows(str(tmp_path / "both")))
    assert len(list(read_rows(str(tmp_path / "both" / "train")))) == 1


def test_whatever_a_library_raises_of_a_file_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ParquetFile:
        def __init__(self, path: Path) -> None:
            raise OSError("Parquet magic bytes not found in footer")

    monkeypatch.setattr(
        "plait.posttrain.data.records.import_module", lambda _: type("P", (), {"ParquetFile": ParquetFile})
    )
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with refused(DataError, str(tmp_path / "rows.parquet"), "OSError: Parquet magic bytes not found in footer"):
        list(read_rows(str(tmp_path / "rows.parquet")))
