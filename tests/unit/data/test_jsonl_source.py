"""JSON lines: whole texts, and prompts with completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.config.data import JsonlData
from plait.data import TokenFile, build_dataset, load_tokenizer
from plait.data.text import JsonlSource, prepare_corpus
from plait.errors import ConfigError, DataError

MAKE_PROBLEMS = Path(__file__).resolve().parents[3] / "examples" / "gsm8k" / "make_problems.py"


def lines(path: Path, *records: Any) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_texts_and_pairs_are_read_line_by_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"t": "one", "p": "1", "c": "I"}, {"t": "two", "p": "2", "c": "II"})
    Path(path).write_text(Path(path).read_text() + "\n")
    assert list(JsonlSource(path, text_key="t").documents()) == [("", "one"), ("", "two")]
    pairs = JsonlSource(path, prompt_key="p", completion_key="c")
    assert list(pairs.documents()) == [("1", "I"), ("2", "II")]


@pytest.mark.parametrize(
    ("bad", "names"),
    [
        ("{", ["JSON"]),
        ("[1]", ["list"]),
        ('{"t": "\\ud83d"}', [r"\ud83d"]),
        ('{"u": "x"}', ["'t'", "'u'"]),
        ('{"t": 3}', ["'t'", "int"]),
        ('{"t": null}', ["'t'", "NoneType"]),
        ('{"t": "\udcb4\udcba"}', ["UTF-8", "iconv -f GB18030"]),  # two bytes of GBK
    ],
)
def test_a_bad_line_is_named_with_file_number_and_reason(tmp_path: Path, bad: str, names: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": "fine"}\n\n' + bad + "\n", encoding="utf-8", errors="surrogateescape")
    with refused(DataError, f"{path}, line 3", *names):
        list(JsonlSource(str(path), text_key="t").documents())


@pytest.mark.parametrize("keys", [{}, {"prompt_key": "p"}, {"text_key": "t", "completion_key": "c"}])
def test_keys_that_do_not_say_what_to_learn_are_refused(keys: dict[str, str]) -> None:
    with refused(DataError, "a.jsonl", "text_key", "prompt_key", "completion_key"):
        JsonlSource("a.jsonl", **keys)
    with refused(ConfigError, "text_key", "prompt_key", "completion_key"):
        JsonlData(path="a.jsonl", **keys)


def test_only_completions_are_learned(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"p": "ask", "c": "say"}, {"p": "and", "c": "then"})
    config = JsonlData(
        path=path, prompt_key="p", completion_key="c", vocab_size=257, seq_len=15, cache=str(tmp_path / "cache")
    )
    item = build_dataset(config, training=True, seed=0)[0]
    tokenizer = load_tokenizer(prepare_corpus(config).tokenizer)
    end = tokenizer.end
    say, then = tokenizer.encode("say"), tokenizer.encode("then")
    assert item["labels"].tolist() == [-100, -100, *say, end, -100, -100, -100, *then, end, -100]
    assert item["document_ids"].tolist() == [0] * 7 + [1] * 8


def test_empty_completions_alone_are_refused(tmp_path: Path) -> None:
    keys = {"prompt_key": "p", "completion_key": "c", "vocab_size": 257, "cache": str(tmp_path / "cache")}
    empty = lines(tmp_path / "a.jsonl", {"p": "ask", "c": ""}, {"p": "and", "c": ""})
    with refused(DataError, empty, "completion"):
        prepare_corpus(JsonlData(path=empty, **keys))
    texts = lines(tmp_path / "texts.jsonl", {"t": ""}, {"t": ""})
    with refused(DataError, texts, "text"):
        prepare_corpus(JsonlData(path=texts, text_key="t", vocab_size=257, cache=str(tmp_path / "cache")))
    prepare_corpus(JsonlData(path=lines(tmp_path / "b.jsonl", {"p": "ask", "c": ""}, {"p": "and", "c": "x"}), **keys))


def test_gsm8k_becomes_questions_that_are_given_and_answers_that_are_learned(tmp_path: Path) -> None:
    command = [sys.executable, str(MAKE_PROBLEMS), "--folder", str(tmp_path), "--train", "300", "--test", "1"]
    subprocess.run(command, check=True, capture_output=True)
    part = tmp_path / "train.jsonl"
    rows = part.read_text(encoding="utf-8").splitlines()
    config = JsonlData(
        path=str(part),
        prompt_key="question",
        completion_key="answer",
        vocab_size=600,
        seq_len=256,
        cache=str(tmp_path / "cache"),
    )
    corpus = prepare_corpus(config)
    tokens, tokenizer = TokenFile(corpus.tokens), load_tokenizer(corpus.tokenizer)
    assert tokens.meta.documents == 300
    assert tokens.mask is not None
    for index in (0, 137, 299):
        record = json.loads(rows[index])
        document, mask = tokens.document(index), tokens.mask[slice(*tokens.offsets[index : index + 2])]
        assert tokenizer.decode(document[mask == 0].tolist()) == record["question"]
        assert tokenizer.decode(document[mask == 1].tolist()) == record["answer"]
    train = build_dataset(config.model_copy(update={"split": "train"}), training=True, seed=0)
    val = build_dataset(config.model_copy(update={"split": "val"}), training=False, seed=0)
    assert len(train) > len(val) > 0
    learned = train[0]["labels"]
    assert 0 < (learned != -100).sum() < 256


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_character_that_would_vanish_is_named(unknown: str | None, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"</s>": 0, "a": 1, "b": 2, **({} if unknown is None else {unknown: 3})}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=unknown))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    path = lines(tmp_path / "a.jsonl", {"t": "ab a"}, {"t": "abc"})
    config = JsonlData(
        path=path, text_key="t", tokenizer=str(tmp_path / "tokenizer.json"), cache=str(tmp_path / "cache"), seq_len=2
    )
    if unknown is None:
        with refused(DataError, f"{path}, document 2", "'c'"):
            prepare_corpus(config)
    else:
        assert TokenFile(prepare_corpus(config).tokens).document(1).tolist() == [1, 2, 3, 0]
