"""Token files: what goes in comes out, and a damaged one is refused."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from tests.refusals import refused

from plait.data import TokenFile, TokenWriter
from plait.errors import DataError


def write(path: Path, documents: list[list[int]], vocab_size: int = 1000) -> TokenFile:
    with TokenWriter(path, vocab_size=vocab_size, tokenizer="abc") as writer:
        for document in documents:
            writer.add(document)
    return TokenFile(path)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_documents_come_back_as_they_were_written(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    rng = np.random.default_rng(random.randrange(2**32))
    documents = [rng.integers(0, vocab_size, size).tolist() for size in (5, 1, 700, 3)]
    documents[0][0] = vocab_size - 1
    found = write(tmp_path / "corpus", documents, vocab_size)
    assert [found.document(i).tolist() for i in range(4)] == documents
    assert len(found) == 709
    assert found.meta.dtype == dtype
    assert (found.meta.documents, found.meta.vocab_size, found.meta.tokenizer) == (4, vocab_size, "abc")


def test_a_mask_comes_back_beside_its_tokens(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "c", vocab_size=10, masked=True) as writer:
        writer.add([1, 2, 3], [0, 0, 1])
        writer.add([4], [1])
    mask = TokenFile(tmp_path / "c").mask
    assert mask is not None
    assert mask.tolist() == [0, 0, 1, 1]


def test_an_empty_document_leaves_no_trace(tmp_path: Path) -> None:
    assert write(tmp_path / "c", [[1], [], [2]]).offsets.tolist() == [0, 1, 2]


def test_a_path_may_be_written_with_or_without_its_suffix(tmp_path: Path) -> None:
    write(tmp_path / "my.corpus.bin", [[1, 2]])
    for name in ("my.corpus", "my.corpus.bin", "my.corpus.json"):
        assert len(TokenFile(tmp_path / name)) == 2


def test_a_token_file_travels_to_another_process_by_name(tmp_path: Path) -> None:
    found = write(tmp_path / "c", [list(range(900))])
    packed = pickle.dumps(found)
    assert len(packed) < 400
    assert pickle.loads(packed).document(0).tolist() == list(range(900))


def test_nothing_appears_before_the_end(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "c", vocab_size=10) as writer:
        writer.add([1])
        with refused(DataError, tmp_path / "c.json"):
            TokenFile(tmp_path / "c")
    assert len(TokenFile(tmp_path / "c")) == 1


def test_a_writer_that_fails_leaves_nothing_behind_and_the_old_file_alone(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2]])
    before = sorted(p.name for p in tmp_path.iterdir())
    with (
        refused(DataError, "11", "vocabulary", "10"),
        TokenWriter(tmp_path / "c", vocab_size=10) as writer,
    ):
        writer.add([3, 11])
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert len(TokenFile(tmp_path / "c")) == 2


@pytest.mark.parametrize(("name", "expected", "found"), [("c.bin", 6, 5), ("c.docs.bin", 24, 23)])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path, name: str, expected: int, found: int) -> None:
    write(tmp_path / "c", [[1, 2], [3]])
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[:-1])
    with refused(DataError, name, f"{expected} bytes", found):
        TokenFile(tmp_path / "c")
    (tmp_path / name).unlink()
    with refused(DataError, tmp_path / name, f"{expected} bytes"):
        TokenFile(tmp_path / "c")


def test_a_description_that_is_not_one_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2], [3]])
    meta = json.loads((tmp_path / "c.json").read_text())
    for change, names in [
        ({"version": 9}, ["version 9", "1"]),
        ({"dtype": "object"}, ["'object'", "uint16", "uint32"]),
        ({"colour": "red"}, ["colour"]),
    ]:
        (tmp_path / "c.json").write_text(json.dumps(meta | change))
        with refused(DataError, tmp_path / "c.json", *names):
            TokenFile(tmp_path / "c")
    (tmp_path / "c.json").write_text("{")
    with refused(DataError, tmp_path / "c.json", "line 1"):
        TokenFile(tmp_path / "c")


def test_document_offsets_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", [[1, 2], [3]])
    np.array([0, 2, 7], dtype="<i8").tofile(tmp_path / "c.docs.bin")
    with refused(DataError, tmp_path / "c.docs.bin", "7", "3"):
        TokenFile(tmp_path / "c")
