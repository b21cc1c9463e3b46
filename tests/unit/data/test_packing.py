"""Packing: sequences of one length, and nothing that crosses documents."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.refusals import refused

from plait.data import PackedTokens, TokenFile, TokenWriter
from plait.errors import DataError


def corpus(path: Path, documents: list[list[int]], masks: list[list[int]] | None = None) -> TokenFile:
    vocab_size = max(map(max, documents)) + 1
    with TokenWriter(path, vocab_size=vocab_size, masked=masks is not None) as writer:
        for number, document in enumerate(documents):
            writer.add(document, masks[number] if masks else None)
    return TokenFile(path)


def lists(item: dict[str, Any]) -> dict[str, list[int]]:
    return {key: value.tolist() for key, value in item.items()}


def test_labels_positions_and_documents_end_with_each_document(tmp_path: Path) -> None:
    packed = PackedTokens(corpus(tmp_path / "c", [[1, 2, 3], [4, 5, 6, 7], [8]]), seq_len=4)
    assert len(packed) == 2
    assert lists(packed[0]) == {
        "input_ids": [1, 2, 3, 4],
        "labels": [2, 3, -100, 5],
        "positions": [0, 1, 2, 0],
        "document_ids": [0, 0, 0, 1],
    }
    assert lists(packed[1]) == {
        "input_ids": [5, 6, 7, 8],
        "labels": [6, 7, -100, -100],
        "positions": [0, 1, 2, 0],
        "document_ids": [0, 0, 0, 1],
    }
    assert all(value.dtype == torch.int64 for value in packed[0].values())


def test_without_a_document_mask_labels_run_on(tmp_path: Path) -> None:
    packed = PackedTokens(corpus(tmp_path / "c", [[1, 2, 3], [4, 5], [6, 7, 8, 9]]), seq_len=4, document_mask=False)
    assert [lists(packed[i]) for i in range(len(packed))] == [
        {"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, 5]},
        {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]},
    ]


def test_given_tokens_are_never_labels(tmp_path: Path) -> None:
    tokens = corpus(tmp_path / "c", [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 0, 1, 1], [0, 1, 1, 1]])
    for document_mask, labels in [(True, [-100, 3, 4, -100]), (False, [-100, 3, 4, -100])]:
        packed = PackedTokens(tokens, seq_len=4, document_mask=document_mask)
        assert packed[0]["labels"].tolist() == labels


def test_packing_agrees_with_a_token_by_token_account(tmp_path: Path) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    documents = [rng.integers(0, 50, rng.integers(1, 40)).tolist() for _ in range(60)]
    masks = [rng.integers(0, 2, len(document)).tolist() for document in documents]
    length = int(rng.integers(1, 50))
    packed = PackedTokens(corpus(tmp_path / "c", documents, masks), seq_len=length)
    stream = [
        (token, mask, number)
        for number, (document, row) in enumerate(zip(documents, masks, strict=True))
        for token, mask in zip(document, row, strict=True)
    ]
    assert len(packed) == len(stream) // length
    for index in range(len(packed)):
        item = lists(packed[index])
        position = 0
        for t in range(length):
            token, _, number = stream[index * length + t]
            follower = stream[index * length + t + 1 : index * length + t + 2]
            same = bool(follower) and follower[0][2] == number
            position = 0 if t == 0 or stream[index * length + t - 1][2] != number else position + 1
            assert item["input_ids"][t] == token
            assert item["labels"][t] == (follower[0][0] if same and follower[0][1] else -100)
            assert item["positions"][t] == position
            assert item["document_ids"][t] == number - stream[index * length][2]


def test_the_two_parts_of_a_split_share_no_document_and_leave_none_out(tmp_path: Path) -> None:
    tokens = corpus(tmp_path / "c", [[number] for number in range(200)])
    parts = {
        split: [packed[i]["input_ids"].item() for i in range(len(packed))]
        for split in ("train", "val")
        for packed in [PackedTokens(tokens, seq_len=1, split=split, val_fraction=0.1)]  # type: ignore[arg-type]
    }
    assert len(parts["val"]) == 20
    assert sorted(parts["train"] + parts["val"]) == list(range(200))
    assert parts["val"] != list(range(20)), "documents are picked over the whole source"
    again = PackedTokens(tokens, seq_len=1, split="val", val_fraction=0.1)
    assert [again[i]["input_ids"].item() for i in range(20)] == parts["val"]


def test_a_single_document_is_split_at_its_end(tmp_path: Path) -> None:
    tokens = corpus(tmp_path / "c", [list(range(100))])
    train = PackedTokens(tokens, seq_len=5, split="train", val_fraction=0.1)
    val = PackedTokens(tokens, seq_len=5, split="val", val_fraction=0.1)
    assert [i for item in map(train.__getitem__, range(len(train))) for i in item["input_ids"].tolist()] == list(
        range(90)
    )
    assert [i for item in map(val.__getitem__, range(len(val))) for i in item["input_ids"].tolist()] == list(
        range(90, 100)
    )


def test_less_than_one_sequence_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "3 tokens", "seq_len 4"):
        PackedTokens(corpus(tmp_path / "c", [[1, 2, 3]]), seq_len=4)


def test_an_index_outside_ends_an_iteration(tmp_path: Path) -> None:
    packed = PackedTokens(corpus(tmp_path / "c", [[1, 2, 3, 4]]), seq_len=2)
    assert packed[-1]["input_ids"].tolist() == [3, 4]
    with pytest.raises(IndexError):
        packed[2]
