"""Examples: formats, templates, what is learned, and what becomes of rows that cannot be used."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import missing, refused

from plait.config import check, parse
from plait.config.posttrain import FileData, TaskData, TemplateConfig
from plait.errors import ConfigError, DataError
from plait.posttrain.data.datasets import pack
from plait.posttrain.data.prepare import PhaseData, prepare_data
from plait.posttrain.data.records import ChatMessage, IncompleteError, examples_in
from plait.posttrain.data.tasks import make_task
from plait.posttrain.data.template import character_tokenizer, make_template, trained_tokenizer

MAKE_PROBLEMS = Path(__file__).parents[3] / "examples" / "gsm8k" / "make_problems.py"
MODEL = {"type": "llama", "vocab_size": 400, "dim": 16, "layers": 1, "heads": 2, "seq_len": 64}


def load(rows: list[Any] | None, tmp_path: Path, phase: str = "sft", **changes: Any) -> PhaseData:
    """The data of a phase, from rows of JSON lines or from the made-up task."""
    section: dict[str, Any] = {"val_fraction": 0.0, "data": [{"type": "task"}], **changes}
    if rows is not None:
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        section["data"] = [{"type": "file", "path": str(file)}]
        trained_tokenizer(["-"], 257).save(tmp_path / "bytes.json")  # a token for each byte, so that lengths are plain
        section.setdefault("tokenizer", str(tmp_path / "bytes.json"))
    sft = {"packing": section.pop("packing", False)}
    return prepare_data(parse({"phase": phase, "model": MODEL, "posttrain": section, "sft": sft}).config)


def learned(data: PhaseData, index: int) -> str:
    labels = data.train[index]["labels"]
    return data.tokenizer.decode(labels[labels >= 0].tolist())


def test_the_three_formats_are_told_apart_by_their_keys(tmp_path: Path) -> None:
    rows = [
        {"prompt": "How many?", "response": "three"},
        {"prompt": [{"role": "user", "content": "Which?"}], "chosen": [{"role": "assistant", "content": "this"}]},
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "Again"},
                {"role": "assistant", "content": "no"},
            ]
        },
    ]
    data = load(rows, tmp_path)
    assert [learned(data, index) for index in range(3)] == ["three", "this", "yesno"]
    ids, labels = data.train[0]["input_ids"], data.train[0]["labels"]
    shown = data.tokenizer.decode(ids.tolist())
    assert shown == "How many?three"
    assert int(labels[-1]) == data.tokenizer.end
    # A label is the token after its place.
    assert torch.equal(labels[:-1][labels[:-1] >= 0], ids[1:][labels[:-1] >= 0])


def test_pairs_share_their_prompt_and_learn_only_from_the_last_answer(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "b?"},
    ]
    data = load([{"prompt": turns, "chosen": "good", "rejected": "poor one"}], tmp_path, phase="dpo")
    item = data.train[0]
    for which, answer in (("chosen", "good"), ("rejected", "poor one")):
        labels = item[f"{which}_labels"]
        assert data.tokenizer.decode(labels[labels >= 0].tolist()) == answer
    batch = data.collate([item, item])
    assert batch["input_ids"].shape == batch["labels"].shape
    assert len(batch["input_ids"]) == len(batch["reference"]) == 4
    assert torch.equal(batch["input_ids"][0], batch["input_ids"][1])
    ends = load([{"prompt": "b", "chosen": "good", "rejected": "poor one"}], tmp_path, phase="reward")
    rewards = ends.collate([ends.train[0]])
    assert rewards["last"].tolist() == [len(ends.train[0][f"{which}_ids"]) - 1 for which in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("keys", "pairs", "expected"),
    [
        ({}, True, "chosen"),  # whatever else the row has
        ({}, False, "response"),
        ({"chosen_key": "best"}, True, "best"),
        ({"chosen_key": "best"}, False, "response"),
        ({"answer_key": "own", "chosen_key": "best"}, True, "best"),
        ({"answer_key": "own", "chosen_key": "best"}, False, "own"),
        ({"answer_key": "own"}, True, "own"),
    ],
)
def test_a_pair_is_made_of_the_answers_under_its_own_keys(keys: dict[str, str], pairs: bool, expected: str) -> None:
    row = {"prompt": "q", "rejected": "no"} | {key: key for key in ("response", "chosen", "best", "own")}
    found = list(examples_in(row, FileData(path="rows.jsonl", **keys), "row 1", pairs=pairs))
    assert [example.messages[-1].content for example in found] == [expected]


def test_an_answer_alone_may_be_the_better_one_of_a_pair_under_any_name() -> None:
    config = FileData(path="rows.jsonl", chosen_key="best")
    (found,) = examples_in({"prompt": "q", "best": "yes", "rejected": "no"}, config, "row 1", pairs=False)
    assert found.messages[-1].content == "yes"
    with refused(IncompleteError, "'best'", "'prompt', 'chosen', 'rejected'"):
        list(examples_in({"prompt": "q", "chosen": "y", "rejected": "n"}, config, "row 1", pairs=True))


def test_rows_that_cannot_be_used_are_counted_and_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "response": "  "},
        {"prompt": "", "response": "a"},
        {"prompt": "q" * 200, "response": "a"},
        {"prompt": "q", "response": "a" * 200},
        {"prompt": "q"},
        {"prompt": "q", "response": 7},
        "{no json",
    ]
    data = load(rows, tmp_path, incomplete="skip")
    assert data.report.kept == len(data.train) == 1
    left_out = dict(data.report.left_out)
    assert (left_out.pop("empty"), left_out.pop("incomplete")) == (2, 3)
    assert [("max_len" in reason, count) for reason, count in left_out.items()] == [(True, 1), (True, 1)]
    assert "line 2" in str(data.report)
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    with refused(DataError, "posttrain.data", "line 1", "rejected"):
        load([same], tmp_path, phase="dpo")


@pytest.mark.parametrize(
    ("row", "key", "names"),
    [
        ({"prompt": "q"}, "incomplete", ["'response'", "'completion'", "'prompt'"]),
        ({"response": "a"}, "incomplete", ["'prompt'", "'response'"]),
        (
            {"messages": [{"role": "user", "content": "q"}]},
            "incomplete",
            ["'messages'", "assistant"],
        ),
        ({"messages": [{"role": "robot", "content": "q"}]}, "incomplete", ["'messages'", "'robot'"]),
        ({"prompt": "q", "response": "\ud83d"}, "incomplete", ["JSON", r"\ud83d"]),
        ({"prompt": "q", "response": ""}, "empty", ["answer"]),
        ({"prompt": "q" * 99, "response": "a"}, "too_long", ["prompt", "max_len", "64"]),
    ],
)
def test_or_they_are_errors_that_name_the_place_and_the_key(row: Any, key: str, names: Any, tmp_path: Path) -> None:
    with refused(DataError, "line 1", f"posttrain.{key}: skip", *names):
        load([row], tmp_path, **{key: "error"})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with refused(DataError, "nowhere"):
        prepare_data(
            parse({"phase": "sft", "model": MODEL, "posttrain": {"data": [{"type": "file", "path": "nowhere"}]}}).config
        )
    path = tmp_path / "tokenizer.json"
    trained_tokenizer(["".join(random.choice("abcdefgh") for _ in range(40)) for _ in range(400)], 500).save(path)
    with refused(ConfigError, "400", "500", key="model.vocab_size"):
        load(None, tmp_path, tokenizer=str(path))
    with refused(ConfigError, "100", "`model.seq_len`", "64", key="posttrain.max_len"):
        load(None, tmp_path, max_len=100)


def test_marked_turns_are_learned_with_their_end_and_without_their_beginning() -> None:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz<>/|_\n 0123456789?")
    template = make_template(TemplateConfig(kind="marked", start="<", end=">", assistant="bot"), tokenizer, None)
    messages = (ChatMessage("user", "hi"), ChatMessage("assistant", "yes"))
    found = template.conversation(messages)
    assert tokenizer.decode(found.ids) == "<user\nhi>\n<bot\nyes>\n"
    assert tokenizer.decode([t for t, wanted in zip(*found, strict=True) if wanted]) == "yes>"
    assert found.ids[-1] == tokenizer.end
    prompt = template.prompt(messages[:1])
    assert tokenizer.decode(prompt) == "<user\nhi>\n<bot\n"
    assert found.ids[: len(prompt)] == prompt


def test_marks_are_tokens_that_no_text_can_forge(tmp_path: Path) -> None:
    forged = "x<|im_end|>"
    rows = [{"prompt": forged, "response": "yes"}]
    data = load(rows, tmp_path, template={"kind": "marked"}, tokenizer=None)
    mark = data.tokenizer.token_id("<|im_end|>")
    assert mark is not None
    ids = data.train[0]["input_ids"].tolist()
    assert ids.count(mark) == 2  # the ends of both turns, and not the one that the user wrote
    assert forged in data.tokenizer.decode(ids, keep_special=True)
    task = load(None, tmp_path, template={"kind": "marked"})
    assert task.train[0]["input_ids"].tolist().count(int(task.tokenizer.token_id("<|im_end|>") or 0)) == 2


@pytest.mark.parametrize(
    "code",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append.__globals__ }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages_and_its_errors_are_named(tmp_path: Path, code: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    tokenizer = trained_tokenizer(["a conversation about nothing"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    fast.chat_template = f"{{% if messages[0].content == 'now' %}}{code}{{% endif %}}"
    fast.save_pretrained(str(tmp_path))
    template = make_template(TemplateConfig(kind="tokenizer"), tokenizer, tmp_path)
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        template.prompt([ChatMessage("user", "now")])


def test_the_template_of_a_tokenizer_is_used_where_it_is_asked_for(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    tokenizer = trained_tokenizer(["a conversation about nothing"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    fast.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    fast.save_pretrained(str(tmp_path))
    template = make_template(TemplateConfig(kind="tokenizer"), tokenizer, tmp_path)
    messages = [
        ChatMessage("user", "q"),
        ChatMessage("assistant", "one"),
        ChatMessage("user", "r"),
        ChatMessage("assistant", "two"),
    ]
    found = template.conversation(messages)
    kept = tokenizer.decode([t for t, wanted in zip(*found, strict=True) if wanted], keep_special=True)
    assert kept == "one<|endoftext|>two<|endoftext|>"
    assert tokenizer.decode(found.ids, keep_special=True).startswith("[user]q[assistant]one")
    with refused(DataError, "posttrain.template.kind: tokenizer", "posttrain.tokenizer", "kind: marked"):
        make_template(TemplateConfig(kind="tokenizer"), tokenizer, None)


@pytest.mark.parametrize("phase", ["sft", "dpo", "grpo"])
def test_nothing_is_trained_on_that_nobody_named(phase: str, tmp_path: Path) -> None:
    with refused(ConfigError, "{type: task}", key="posttrain.data"):
        load(None, tmp_path, phase=phase, data=[])
    with refused(ConfigError, "{type: task}", key="posttrain.data"):
        check(parse({"phase": phase, "model": MODEL}).config, has_val=True, require_length=False)


def test_packed_examples_stay_whole_and_do_not_see_each_other(tmp_path: Path) -> None:
    packed, single = (load(None, tmp_path, packing=packing, max_len=40) for packing in (True, False))
    assert len(packed.train) < len(single.train) / 3
    seen = []
    for index in range(len(packed.train)):
        row = packed.train[index]
        assert len(row["input_ids"]) == 40
        for document in row["document_ids"].unique().tolist():
            inside = row["document_ids"] == document
            assert row["positions"][inside].tolist() == list(range(int(inside.sum())))
            if (row["labels"][inside] >= 0).any():
                seen.append((row["input_ids"][inside].tolist(), row["labels"][inside].tolist()))
    expected = [
        (single.train[i]["input_ids"].tolist(), single.train[i]["labels"].tolist()) for i in range(len(single.train))
    ]
    assert sorted(seen) == sorted(expected)


def test_packing_loses_nothing_and_fills_rows_well() -> None:
    lengths = [random.randint(1, 30) for _ in range(500)]
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
    assert len(rows) <= -(-sum(lengths) // 64) + 3


def test_three_phases_share_out_the_prompts_and_validation_has_its_own(tmp_path: Path) -> None:
    parts = {}
    for phase in ("sft", "dpo"):
        data = load(None, tmp_path, phase=phase, data_split="2,4,4", val_fraction=0.25)
        train, val = ({example.prompt_text for example in part} for part in data.examples)
        assert not train & val
        parts[phase] = train | val
        assert len(val) / len(train | val) == pytest.approx(0.25, abs=0.01)
    assert not parts["sft"] & parts["dpo"]
    assert len(parts["sft"]) / len(parts["dpo"]) == pytest.approx(0.5, abs=0.01)
    with refused(ConfigError, "'2,4'", "`2,4,4`", key="posttrain"):
        load(None, tmp_path, data_split="2,4")
    with refused(DataError, "posttrain.data_split", "(0, 1, 1)", "sft"):
        load(None, tmp_path, data_split=[0, 1, 1])


@pytest.mark.parametrize("name", ["sorting", "arithmetic"])
def test_a_made_up_task_knows_right_from_wrong(name: Any) -> None:
    task = make_task(TaskData(name=name))
    examples = task.examples(300)
    assert len({example.prompt_text for example in examples}) == 300
    for example in examples:
        question, answer = example.messages[0].content, example.messages[1].content
        assert example.rejected is not None
        assert task.reward(question, answer) == 1.0
        assert task.reward(question, example.rejected) == 0.0
        assert set(question + answer + example.rejected) <= set(task.alphabet)
    for example in task.examples(100, wrongs=24):
        assert example.rejected
        assert task.reward(example.messages[0].content, example.rejected) == 0.0
        assert set(example.rejected) <= set(task.alphabet)
    assert task.reward("what?", "0") == 0.0
    with refused(ConfigError, str(10**6), "`size`", key="posttrain.data.samples"):
        make_task(TaskData(name=name, size=1)).examples(10**6)


def test_a_judge_sees_where_an_answer_ends_and_whether_it_fits_is_counted_with_that(tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    pair = load([row], tmp_path, phase="reward").train[0]
    end = load([row], tmp_path, phase="reward").tokenizer.end
    assert [pair[f"{which}_ids"].tolist()[-1] for which in ("chosen", "rejected")] == [end, end]
    learned_from = load([row], tmp_path, phase="dpo").train[0]
    assert learned_from["chosen_ids"].tolist() == pair["chosen_ids"].tolist()[:-1]  # there the end is only learned
    assert len(load([row], tmp_path, phase="dpo", max_len=4).train) == 1
    with refused(DataError, "line 1", "max_len", "5 tokens", "4"):
        load([row], tmp_path, phase="reward", max_len=4)


def test_parquet_and_saved_data_sets_are_read_like_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index}", "response": f"a{index}"} for index in range(5)]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    paths = [tmp_path / "rows.parquet"]
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset(datasets.table.InMemoryTable(table), fingerprint="rows")
    saved.save_to_disk(str(tmp_path / "saved"))
    paths.append(tmp_path / "saved")
    expected = load(rows, tmp_path)
    for path in paths:
        tokenizer = str(tmp_path / "bytes.json")
        found = load(None, tmp_path, data=[{"type": "file", "path": str(path)}], tokenizer=tokenizer)
        assert [learned(found, i) for i in range(5)] == [learned(expected, i) for i in range(5)]


def test_school_maths_gives_answers_and_pairs_of_graded_solutions(tmp_path: Path) -> None:
    model = {**MODEL, "vocab_size": 600, "seq_len": 512}
    command = [sys.executable, str(MAKE_PROBLEMS), "--folder", str(tmp_path), "--train", "1", "--test", "40"]
    subprocess.run(command, check=True, capture_output=True)
    for name, phase in (("test", "sft"), ("solutions", "reward")):
        path = tmp_path / f"{name}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        section = {"data": [{"type": "gsm8k", "path": str(path)}], "val_fraction": 0.2}
        data = prepare_data(parse({"phase": phase, "model": model, "posttrain": section}).config)
        train, val = ({example.prompt_text for example in part} for part in data.examples)
        assert train
        assert val
        assert not train & val  # pairs of one question stay together
        if phase == "reward":
            graded = {json.loads(line)["question"]: json.loads(line) for line in lines}
            for example in data.examples[0]:
                row = graded[example.prompt[0].content]
                verdicts = {v["solution"]: v["is_correct"] for v in row.values() if isinstance(v, dict)}
                assert verdicts[example.messages[-1].content]
                assert not verdicts[str(example.rejected)]


def test_prompts_that_repeat_are_all_asked_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{index % 57}", "answer": str(index), "id": index} for index in range(80)]
    data = load(rows, tmp_path, phase="grpo")
    assert len(data.train) == data.report.rows == data.report.kept == 80
    assert len(data.report.prompts) == 57
    assert sorted(prompt.right for prompt in data.train) == sorted(str(index) for index in range(80))
    said = str(data.report)
    assert not missing(said, "80", "57", "'id'")
    again = load([*rows, *rows[:5]], tmp_path)
    assert (len(again.train), again.report.rows) == (85, 85)
    assert "5 of" in str(again.report)


def test_prompts_that_leave_little_room_for_an_answer_are_counted(tmp_path: Path) -> None:
    account = load([{"prompt": "q"}, {"prompt": "q" * 60}], tmp_path, phase="grpo", max_len=64).report
    assert account.kept == 2
    assert list(account.noted.values()) == [2]
    assert not missing(str(account), "rollout.max_new_tokens", "max_len")
    assert account.is_unusual


def test_weights_of_rows_and_turns_are_what_is_learned(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "good", "weight": 1},
    ]
    rows = [{"messages": talk}, {"prompt": "q", "response": "a", "weight": 0}, {"messages": talk[:2]}]
    data = load(rows, tmp_path)
    assert [learned(data, index) for index in range(len(data.train))] == ["good"]
    assert data.tokenizer.decode(data.train[0]["input_ids"].tolist()) == "a?badb?good"
    assert list(data.report.left_out.values()) == [2]
    with refused(DataError, "line 1", "'weight'", "0.5", "posttrain.incomplete: skip"):
        load([{"prompt": "q", "response": "a", "weight": 0.5}], tmp_path)


def test_answers_without_a_token_to_learn_are_counted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.BPE(vocab={"</s>": 0, "q": 1, "a": 2}, merges=[]))  # and nothing for other characters
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "small.json"))
    given: dict[str, Any] = {"tokenizer": str(tmp_path / "small.json"), "template": {"end_token": False}}
    data = load([{"prompt": "q", "response": "a"}, {"prompt": "q", "response": "x"}], tmp_path, **given)
    assert (data.report.kept, data.report.left_out) == (1, {"empty": 1})
    assert list(data.report.noted.values()) == [1]
    assert "'x'" in str(data.report)
    pair = {"prompt": "q", "chosen": "ax", "rejected": "ay"}
    with refused(DataError, "line 1", "posttrain.empty: skip"):
        load([pair], tmp_path, phase="dpo", empty="error", **given)


def test_prompts_that_are_both_trained_on_and_validated_on_are_counted(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(json.dumps({"prompt": f"q{index}", "response": "a"}) for index in range(2, 6)))
    rows = [{"prompt": f"q{index}", "response": "a"} for index in range(4)]
    changes = {"val_data": [{"type": "file", "path": str(held)}]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = {"data": [{"type": "file", "path": str(tmp_path / "rows.jsonl")}], **changes}
    account = prepare_data(parse({"phase": "sft", "model": MODEL, "posttrain": section}).config).report
    assert list(account.noted.values()) == [2]
    assert not missing(str(account), "posttrain.val_data", "held.jsonl, line 1")


@pytest.mark.parametrize(
    ("sizes", "error", "names"),
    [
        ({"vocab_size": 12, "max_position_embeddings": 32}, ConfigError, ["posttrain.max_len", "40", "32"]),
        ({"vocab_size": 12, "n_ctx": 32}, ConfigError, ["posttrain.max_len", "40", "32"]),
        ({"vocab_size": 9, "max_position_embeddings": 64}, DataError, ["posttrain.tokenizer", "12", "9"]),
        ({"text_config": {"vocab_size": 9}, "n_positions": 64}, DataError, ["posttrain.tokenizer", "12", "9"]),
    ],
)
def test_a_model_of_transformers_is_asked_for_its_own_sizes(
    sizes: dict[str, Any], error: type[Exception], names: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}), encoding="utf-8")
    model = {"type": "hf", "path": str(tmp_path)}
    load(None, tmp_path).tokenizer.save(tmp_path / "tokenizer.json")
    section = {"data": [{"type": "task"}], "max_len": 40}
    with refused(error, *names):
        prepare_data(parse({"phase": "sft", "model": model, "posttrain": section}).config)
