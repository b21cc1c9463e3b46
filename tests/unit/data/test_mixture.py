"""Several sources as one data set."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused

from plait import Runner
from plait.config import check, parse, parse_sections
from plait.config.paths import missing_paths
from plait.config.train import ResolvedBatch
from plait.data import RankLoader
from plait.data.mixture import MixtureSource
from plait.errors import ConfigError, DataError

sizes = st.lists(st.integers(1, 40), min_size=2, max_size=4)


def numbered(lengths: list[int]) -> list[list[tuple[int, int]]]:
    return [[(place, index) for index in range(length)] for place, length in enumerate(lengths)]


def epochs(mixture: MixtureSource, count: int) -> list[list[Any]]:
    found = []
    for epoch in range(count):
        mixture.set_epoch(epoch)
        found.append([mixture[position] for position in range(len(mixture))])
    return found


@given(sizes, st.data())
def test_each_source_has_its_share_of_every_epoch(lengths: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 9.0), min_size=len(lengths), max_size=len(lengths)))
    samples = data.draw(st.integers(1, 200))
    for epoch in epochs(MixtureSource(numbered(lengths), weights, samples, seed=3), 2):
        seen = Counter(source for source, _ in epoch)
        assert len(epoch) == samples
        for source, weight in enumerate(weights):
            assert abs(seen[source] - samples * weight / sum(weights)) < 1


@given(sizes, st.integers(1, 60), st.booleans())
def test_a_sample_comes_again_only_after_all_others_of_its_source(
    lengths: list[int], samples: int, shuffle: bool
) -> None:
    found = epochs(MixtureSource(numbered(lengths), [1.0] * len(lengths), samples, seed=5, shuffle=shuffle), 4)
    for source, length in enumerate(lengths):
        order = [index for epoch in found for place, index in epoch if place == source]
        for start in range(0, len(order) - length + 1, length):
            assert sorted(order[start : start + length]) == list(range(length))


@given(sizes)
def test_without_weights_an_epoch_has_every_sample_once(lengths: list[int]) -> None:
    sources = numbered(lengths)
    for epoch in epochs(MixtureSource(sources, seed=1), 2):
        assert sorted(epoch) == sorted(sample for source in sources for sample in source)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_ranks_and_workers(workers: int) -> None:
    seed, start = random.randrange(2**31), random.randrange(3)

    def steps(ranks: int) -> list[list[int]]:
        sources = [torch.arange(7), torch.arange(100, 140)]
        found: list[list[int]] = []
        for rank in range(ranks):
            mixture = MixtureSource(sources, [1.0, 2.0], 24, seed=seed)
            batch = ResolvedBatch(8, 8 // ranks, 1)
            with_workers = workers if rank == 0 else 0
            loader = RankLoader(
                mixture, rank=rank, ranks=ranks, batch=batch, seed=seed, shuffle=True, workers=with_workers
            )
            own = [micro[0].inputs.tolist() for micro in loader.epoch(1, start)]
            loader.close()
            found = [a + b for a, b in zip(found, own, strict=True)] if found else own
        return found

    assert steps(1) == steps(2)
    assert {number >= 100 for step in steps(1) for number in step} == {True, False}


def test_a_stream_cannot_be_a_source() -> None:
    with refused(DataError, "list_iterator", "mixture", "stream"):
        MixtureSource([[1, 2], iter([3])], seed=0)


# ---- as a section


def described(tmp_path: Path, **more: Any) -> dict[str, Any]:
    for name, line in (("a", "alpha beta gamma\n"), ("b", "one two three\n")):
        (tmp_path / f"{name}.txt").write_text(line * 200)
    common = {"type": "text", "seq_len": 16, "cache": str(tmp_path / "cache")}
    first = {**common, "path": str(tmp_path / "a.txt"), "vocab_size": 260}
    return {"type": "mixture", "sources": [first, {**common, "path": str(tmp_path / "b.txt")}], **more}


def test_texts_of_a_mixture_share_the_tokenizer_of_the_first_and_so_does_validation(tmp_path: Path) -> None:
    runner = Runner.from_config(
        {
            "model": {"type": "gpt", "vocab_size": 260, "dim": 16, "layers": 1, "heads": 2, "seq_len": 16},
            "data": described(tmp_path, weights=[3, 1], samples=40),
            "val_data": described(tmp_path)["sources"][1],
            "batch": {"total": 4},
            "train": {"max_epochs": 2},
            "work_dir": str(tmp_path / "run"),
            "log": {"console": "none"},
            "device": "cpu",
        }
    )
    with runner:
        runner.train()
        mixture = runner.loader.dataset
        assert mixture.counts == [30, 10]
        assert len({source.tokens.meta.tokenizer for source in mixture.sources}) == 1
        assert runner.eval_loader("val_data").dataset.tokens.meta.tokenizer == mixture.sources[0].tokens.meta.tokenizer
        assert (runner.step, mixture.seq_len, mixture.vocab_size) == (20, 16, 260)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"weights": [1.0]}, ["1", "2"]),
        ({"sources.1.seq_len": 32}, ["32", "16"]),
        ({"sources.1.workers": 2}, ["2"]),
        ({"sources.1.tokenizer": "other.json"}, ["'other.json'"]),
        ({"sources.1.vocab_size": 300}, ["300"]),
    ],
)
def test_sources_that_do_not_fit_together_are_named(tmp_path: Path, change: dict[str, Any], names: list[str]) -> None:
    section = described(tmp_path)
    overrides = [f"data.{key}={value}" for key, value in change.items()]
    with refused(ConfigError, *names, key=f"data.{next(iter(change))}"):
        check(parse({"data": section}, overrides).config, has_val=False, require_length=False)


def test_a_file_that_is_not_there_is_named_with_its_place(tmp_path: Path) -> None:
    section = described(tmp_path)
    (tmp_path / "b.txt").unlink()
    assert [problem.path for problem in missing_paths(parse_sections(data=section).config)] == ["data.sources.1.path"]
