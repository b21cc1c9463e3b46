"""Text to documents, documents to tokens, tokens to the cache."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from tests.refusals import refused

from plait.config.data import TextData
from plait.data import TokenFile, build_dataset, load_tokenizer, train_tokenizer
from plait.data.text import JsonlSource, TextSource, cached, prepare_corpus
from plait.errors import DataError


def texts(path: Path) -> list[str]:
    return [text for _, text in TextSource(str(path)).documents()]


def test_a_file_a_folder_and_a_glob_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("ay")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.md").write_text("see")
    assert texts(tmp_path / "b.txt") == ["bee"]
    assert texts(tmp_path) == ["bee", "see", "ay"]
    assert texts(tmp_path / "**" / "*.txt") == ["bee", "ay"]


def test_an_end_mark_in_a_file_separates_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one<|endoftext|>two<|endoftext|>\n")
    assert texts(tmp_path / "a.txt") == ["one", "two"]


def test_missing_empty_and_undecodable_sources_are_named(tmp_path: Path) -> None:
    with refused(DataError, tmp_path / "nowhere"):
        texts(tmp_path / "nowhere")
    with refused(DataError, tmp_path, "files"):
        texts(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    with refused(DataError, tmp_path / "a.bin", "UTF-8"):
        texts(tmp_path)


def test_chinese_text_is_read_with_and_without_a_mark_at_its_start_and_gbk_is_named(tmp_path: Path) -> None:
    text = "春眠不觉晓，处处闻啼鸟。"
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "诗.txt").write_text(text, encoding=encoding)
        assert texts(tmp_path / "诗.txt") == [text]
    (tmp_path / "诗.txt").write_text(text, encoding="gbk")
    with refused(DataError, tmp_path / "诗.txt", "UTF-8", "iconv -f GB18030 -t UTF-8"):
        texts(tmp_path / "诗.txt")


def test_the_standard_library_is_a_source_without_tests_or_packages() -> None:
    files = TextSource("stdlib").files()
    assert len(files) > 300
    assert files == sorted(files)
    parts = {part for path in files for part in path.parent.parts}
    assert not parts & {"site-packages", "test", "tests", "idle_test"}
    limited = TextSource("stdlib", limit_mb=0.3).files()
    assert limited == files[: len(limited)]
    assert 0 < sum(path.stat().st_size for path in limited) <= 300_000


def test_a_limit_below_the_first_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    with pytest.raises(DataError, match="limit_mb"):
        TextSource(str(tmp_path), limit_mb=0.0001).files()


def test_a_small_standard_library_corpus_becomes_sequences(tmp_path: Path) -> None:
    config = TextData(path="stdlib", limit_mb=0.2, vocab_size=400, seq_len=64, cache=str(tmp_path))
    dataset = build_dataset(config, training=True, seed=0)
    assert dataset.vocab_size == 400
    corpus = prepare_corpus(config)
    tokens, tokenizer = TokenFile(corpus.tokens), load_tokenizer(corpus.tokenizer)
    sources = [text for _, text in TextSource("stdlib", 0.2).documents()]
    assert tokens.meta.documents == len(sources)
    assert tokens.meta.tokenizer == tokenizer.digest
    for index, text in enumerate(sources):
        document = tokens.document(index).tolist()
        assert document[-1] == tokenizer.end
        assert tokenizer.decode(document) == text
    item = dataset[0]
    assert item["input_ids"].tolist() == tokens.tokens[:64].tolist()


def test_the_cache_is_found_again_and_depends_on_the_content(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    config = TextData(path=str(tmp_path / "a.txt"), vocab_size=260, cache=str(tmp_path / "cache"))
    first = prepare_corpus(config).folder
    stamp = (first / "tokens.bin").stat().st_mtime_ns
    assert prepare_corpus(config).folder == first
    assert (first / "tokens.bin").stat().st_mtime_ns == stamp
    assert prepare_corpus(config.model_copy(update={"split": "val", "seq_len": 8})).folder == first
    assert prepare_corpus(config.model_copy(update={"vocab_size": 261})).folder != first
    (tmp_path / "a.txt").write_text("that is the question " * 50)
    assert prepare_corpus(config).folder != first
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


def test_a_given_tokenizer_is_used_for_another_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    (tmp_path / "b.txt").write_text("or not")
    config = TextData(path=str(tmp_path / "a.txt"), vocab_size=270, cache=str(tmp_path / "cache"))
    trained = prepare_corpus(config).tokenizer
    other = TextData(path=str(tmp_path / "b.txt"), cache=str(tmp_path / "cache"))
    by_config = prepare_corpus(other.model_copy(update={"tokenizer": str(trained)}))
    by_argument = prepare_corpus(other, tokenizer=trained)
    assert by_config == by_argument
    assert TokenFile(by_config.tokens).meta.tokenizer == load_tokenizer(trained).digest
    with refused(DataError, tmp_path / "gone.json"):
        prepare_corpus(other, tokenizer=tmp_path / "gone.json")


def test_a_failed_build_leaves_no_entry(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("  \n")
    config = TextData(path=str(tmp_path / "a.txt"), vocab_size=260, cache=str(tmp_path / "cache"))
    with refused(DataError, tmp_path / "a.txt", "text"):
        prepare_corpus(config)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be")
    config = TextData(path=str(tmp_path / "a.txt"), vocab_size=260, cache=str(tmp_path / "a.txt"))
    with refused(DataError, tmp_path / "a.txt", "Not a directory", "`data.cache`"):
        prepare_corpus(config)


def _build_slowly(root: Path, barrier: object, number: int) -> None:
    def build(folder: Path) -> None:
        barrier.wait(30)  # type: ignore[attr-defined]
        (folder / "who").write_text(str(number))

    cached(root, "entry", build)


def test_processes_that_build_one_entry_at_once_end_with_one_whole_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    workers = [context.Process(target=_build_slowly, args=(tmp_path, barrier, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["entry"]
    assert (tmp_path / "entry" / "who").read_text() in "012"


def test_training_a_tokenizer_twice_gives_the_same_one() -> None:
    sample = [text for _, text in TextSource("stdlib", 0.1).documents()]
    one, other = train_tokenizer(sample, 500), train_tokenizer(sample, 500)
    assert one.digest == other.digest
    assert one.vocab_size == 500


@pytest.mark.parametrize("text", ["", "plain", "naïve — 日本語 🙂\n\ttabs", "a <|endoftext|> b"])
def test_any_text_survives_encoding_and_decoding(text: str, tmp_path: Path) -> None:
    trained = train_tokenizer(["some words to learn from"], 260)
    trained.save(tmp_path / "tokenizer.json")
    with refused(DataError, tmp_path, "folder", "tokenizer.json"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    tokens = tokenizer.encode(text)
    assert tokenizer.end not in tokens
    assert tokenizer.decode(tokens) == text
    assert list(tokenizer.encode_many([text, text])) == [tokens, tokens]
    assert tokenizer.decode([*tokens, tokenizer.end]) == text
    assert tokenizer.decode([*tokens, tokenizer.end], keep_special=True) == text + "<|endoftext|>"


def test_a_file_that_cannot_be_read_in_the_middle_is_named() -> None:
    unreadable = "/proc/self/mem"  # it can be opened, and reading its beginning is an error of the device
    lines = JsonlSource(unreadable, text_key="text")
    for read in (TextSource(unreadable).fingerprint, lines.fingerprint, lambda: list(lines.documents())):
        with refused(DataError, unreadable, "Input/output error"):
            read()


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    (tmp_path / "broken.json").write_text("{}")
    with refused(DataError, tmp_path / "broken.json", "tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "endless.json"))
    with refused(DataError, tmp_path / "endless.json", "<|endoftext|>"):
        load_tokenizer(tmp_path / "endless.json")
    with refused(DataError, "vocab_size", "100", "257"):
        train_tokenizer(["abc"], 100)
