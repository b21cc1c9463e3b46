"""What objectives hide, and that it is a pure function of (seed, epoch, row)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from plait.config import check, parse_sections
from plait.data import RankLoader, TokenWriter, build_dataset, target_length
from plait.errors import ConfigError, DataError

WORDS = [f"word{number}" for number in range(40)]
PIECES = [f"##{number}" for number in range(5)]
NAMES = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *(f"<extra_id_{number}>" for number in range(12))]
SEQ = 24


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of whole words, 30 texts of 1 to 60 words, and as many pairs."""
    vocabulary = {name: number for number, name in enumerate([*NAMES, *WORDS, *PIECES])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(NAMES)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    dice = random.Random(3)
    texts = [" ".join(dice.choice(WORDS) + str(dice.randrange(5)) for _ in range(length)) for length in range(1, 31)]
    (tmp_path / "texts.txt").write_text("<|endoftext|>".join(texts))
    rows = [{"source": " ".join(WORDS[: 1 + n % 7]), "target": " ".join(WORDS[: 1 + n % 4])} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def rows_of(folder: Path, objective: dict[str, Any], *, seed: int = 5, **keys: Any) -> Any:
    section = {
        "type": "text",
        "path": str(folder / "texts.txt"),
        "tokenizer": str(folder / "tokenizer.json"),
        "seq_len": SEQ,
        "cache": str(folder / "cache"),
        "objective": objective,
        **keys,
    }
    return build_dataset(parse_sections(data=section).config.data, training=True, seed=seed)


def content(row: dict[str, torch.Tensor], key: str = "input_ids") -> list[int]:
    kept = row["attention_mask"].bool() if key == "input_ids" else row[key] != -100
    return row[key][kept].tolist()


OBJECTIVES = [
    {"type": "masked", "probability": 0.3},
    {"type": "masked", "probability": 0.3, "whole_words": True},
    {"type": "span_corruption"},
    {"type": "denoising"},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: "words" if o.get("whole_words") else o["type"])
@pytest.mark.parametrize("document_mask", [True, False])
def test_what_is_hidden_depends_on_seed_epoch_and_row_alone(
    folder: Path, objective: dict[str, Any], document_mask: bool
) -> None:
    rows = rows_of(folder, objective, document_mask=document_mask)
    again = rows_of(folder, objective, document_mask=document_mask)
    other = rows_of(folder, objective, seed=6, document_mask=document_mask)
    order = list(range(len(rows)))
    for epoch in (0, 2):
        for dataset in (rows, again, other):
            dataset.set_epoch(epoch)
        there = [rows[index] for index in order]
        back = [again[index] for index in reversed(order)][::-1]
        for one, two in zip(there, back, strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one)
        assert any(not torch.equal(one["input_ids"], other[index]["input_ids"]) for index, one in enumerate(there))
    rows.set_epoch(0)
    assert any(not torch.equal(rows[index]["input_ids"], there[index]["input_ids"]) for index in order)
    assert {row["labels"].shape for row in there} == {(rows[0]["labels"].shape[0],)}
    assert "attention_mask" in there[0] or not document_mask


def test_masked_words_are_replaced_as_configured(folder: Path) -> None:
    rows = rows_of(folder, {"type": "masked", "probability": 0.4})
    plain = rows_of(folder, {"type": "masked", "probability": 0.4, "mask_share": 0.0, "random_share": 0.0})
    how = {"mask": 0, "same": 0, "other": 0}
    tokens = 0
    for epoch in range(20):
        rows.set_epoch(epoch)
        for index in range(len(rows)):
            row, truth = rows[index], plain[index]["input_ids"]
            chosen = row["labels"] != -100
            tokens += int(row["attention_mask"].sum()) - 2
            assert torch.equal(row["labels"][chosen], truth[chosen])
            assert torch.equal(row["input_ids"][~chosen], truth[~chosen])
            assert row["input_ids"][0] == 1
            assert content(row)[-1] == 2
            assert not chosen[0]
            for shown, was in zip(row["input_ids"][chosen].tolist(), truth[chosen].tolist(), strict=True):
                how["mask" if shown == 3 else "same" if shown == was else "other"] += 1
                assert shown == 3 or shown >= len(NAMES)
    count = sum(how.values())
    assert count / tokens == pytest.approx(0.4, abs=0.02)
    assert how["mask"] / count == pytest.approx(0.8, abs=0.02)
    assert how["other"] / count == pytest.approx(0.1, abs=0.02)


def test_whole_words_are_chosen_with_all_of_their_pieces(folder: Path) -> None:
    rows = rows_of(
        folder, {"type": "masked", "probability": 0.3, "whole_words": True, "mask_share": 1.0, "random_share": 0.0}
    )
    first_piece = len(NAMES) + len(WORDS)
    seen = 0
    for index in range(len(rows)):
        labels, ids = rows[index]["labels"], rows[index]["input_ids"]
        for at in range(2, SEQ):  # the piece at the start of a row may continue a word of the row before
            piece = labels[at] >= first_piece if labels[at] != -100 else ids[at] >= first_piece
            if piece:
                seen += 1
                assert (labels[at] != -100) == (labels[at - 1] != -100)
    assert seen > 50


def test_no_row_has_tokens_of_two_documents(folder: Path) -> None:
    objective = {"type": "masked", "probability": 0.3, "mask_share": 0.0, "random_share": 0.0}
    rows = rows_of(folder, objective)
    texts = (folder / "texts.txt").read_text().split("<|endoftext|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected += [[1, *ids[at : at + SEQ - 2], 2] for at in range(0, len(ids), SEQ - 2)]
    assert [content(rows[index]) for index in range(len(rows))] == expected


SPANS = {"type": "span_corruption", "probability": 0.3, "mean_span_length": 2.0}


def restored(row: dict[str, torch.Tensor]) -> list[int]:
    """The text of a row: what the encoder sees, with the decoder's spans in place of their sentinels."""
    sentinels = {NAMES.index(f"<extra_id_{number}>") for number in range(12)}
    spans: dict[int, list[int]] = {}
    *target, end = content(row, "labels")
    assert end == 2
    for token in target:
        if token in sentinels:
            current = spans[token] = []
        else:
            current.append(token)
    return [token for shown in content(row) for token in spans.get(shown, [shown])]


def test_the_decoder_writes_what_the_encoder_does_not_see(folder: Path) -> None:
    rows, others = rows_of(folder, SPANS), rows_of(folder, SPANS, seed=9)
    for index in range(len(rows)):
        assert restored(rows[index]) == restored(others[index])
    assert any(not torch.equal(rows[index]["input_ids"], others[index]["input_ids"]) for index in range(len(rows)))


def test_a_plan_knows_the_number_of_labels(folder: Path) -> None:
    section = parse_sections(data={"type": "text", "path": "x", "objective": SPANS}).config.data
    planned = target_length(section.objective, SEQ)  # type: ignore[union-attr]
    assert abs(planned - len(rows_of(folder, SPANS)[0]["labels"])) <= 1  # this tokenizer has a token more around a text


def test_infilling_asks_for_the_whole_text(folder: Path) -> None:
    rows = rows_of(folder, {"type": "denoising"})
    for index in range(len(rows)):
        shown, whole = content(rows[index]), content(rows[index], "labels")
        assert whole[0] == 1
        assert whole[-1] == 2
        hidden = len(whole) - len([token for token in shown if token != 3])
        assert hidden == (0 if len(whole) == 3 else max(1, round((len(whole) - 2) * 0.3)))


def test_pairs_are_prompts_and_completions(folder: Path) -> None:
    pairs: dict[str, Any] = {
        "type": "jsonl",
        "path": str(folder / "pairs.jsonl"),
        "prompt_key": "source",
        "completion_key": "target",
    }
    rows = rows_of(folder, {"type": "seq2seq", "target_len": 6}, **pairs)
    first = len(NAMES)
    assert len(rows) == 20
    assert content(rows[5]) == [1, *range(first, first + 6), 2]
    assert content(rows[5], "labels") == [1, first, first + 1, 2]
    with refused(DataError, "objective.target_len", "6"):
        rows_of(folder, {"type": "seq2seq", "target_len": 5}, **pairs)
    with refused(DataError, "seq_len", "9"):
        rows_of(folder, {"type": "seq2seq"}, **pairs, seq_len=8)
    cut = rows_of(folder, {"type": "seq2seq", "target_len": 5, "truncate": True}, **pairs)
    assert content(cut[3], "labels") == [1, first, first + 1, first + 2, 2]


def test_a_token_file_needs_the_tokenizer_that_made_it(folder: Path) -> None:
    with TokenWriter(folder / "tokens", vocab_size=70, tokenizer="other") as tokens:
        tokens.add(list(range(20, 50)))
    section = {"type": "tokens", "path": str(folder / "tokens"), "seq_len": 16, "objective": {"type": "masked"}}
    with refused(ConfigError, "data.tokenizer"):
        check(parse_sections(data=section).config, has_val=False, require_length=False)
    config = parse_sections(data={**section, "tokenizer": str(folder / "tokenizer.json")}).config.data
    with refused(ConfigError, "data.tokenizer"):
        build_dataset(config, training=True, seed=0)


def test_a_trained_tokenizer_has_the_tokens_of_the_objective(folder: Path) -> None:
    for objective in OBJECTIVES:
        rows = rows_of(folder, objective, tokenizer=None, vocab_size=512)
        assert all(0 <= int(row.max()) < 512 for index in range(3) for row in [rows[index]["input_ids"]])


def backwards(*, tokenizer: Any, seq_len: int, times: int) -> Any:
    def objective(tokens: np.ndarray, dice: np.random.Generator) -> dict[str, Any]:
        row = np.resize(tokens[::-1] * times, seq_len)
        return {"input_ids": row, "labels": row + dice.integers(2)}

    return objective


def test_an_objective_of_ones_own(folder: Path) -> None:
    rows = rows_of(folder, {"type": f"{__name__}:backwards", "times": 1}, document_mask=False)
    assert rows[0]["input_ids"].shape == (SEQ,)


def test_batches_do_not_depend_on_where_a_run_resumed(folder: Path) -> None:
    rows = rows_of(folder, OBJECTIVES[0])
    sizes: Any = type("Sizes", (), {"total": 4, "micro": 2, "accumulation": 2})
    halves: Any = type("Sizes", (), {"total": 4, "micro": 2, "accumulation": 1})

    def inputs(*ranks: Any) -> torch.Tensor:
        return torch.cat([batch.inputs["input_ids"] for step in ranks for batch in step if batch.samples])

    whole = [inputs(step) for step in RankLoader(rows, rank=0, ranks=1, batch=sizes, seed=1, shuffle=True).epoch(3)]
    resumed = RankLoader(rows, rank=0, ranks=1, batch=sizes, seed=1, shuffle=True).epoch(3, 2)
    assert all(torch.equal(inputs(step), whole[2 + at]) for at, step in enumerate(resumed))
    parts = [RankLoader(rows, rank=rank, ranks=2, batch=halves, seed=1, shuffle=True).epoch(3) for rank in (0, 1)]
    for at, steps in enumerate(zip(*parts, strict=True)):
        assert torch.equal(inputs(*steps), whole[at])
