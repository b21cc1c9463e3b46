"""Samplers, collating, preprocessing and metrics, on one process."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from tests.refusals import refused

from plait.errors import ConfigError, DataError
from plait.frontends.mmengine import (
    BaseMetric,
    DefaultSampler,
    Evaluator,
    ImgDataPreprocessor,
    InfiniteSampler,
    default_collate,
    pseudo_collate,
)
from plait.frontends.mmengine.dataset import build_dataloader


class Pair(NamedTuple):
    x: Any
    y: Any


def test_ranks_share_out_one_order_and_see_equally_many() -> None:
    count, size = random.randint(3, 40), random.randint(1, 5)
    parts = []
    for rank in range(size):
        sampler = DefaultSampler(range(count), seed=3)
        sampler.rank, sampler.world_size = rank, size
        sampler.num_samples = -(-count // size)
        sampler.total_size = sampler.num_samples * size
        sampler.set_epoch(2)
        parts.append(list(sampler))
        sampler.skip(1)
        assert list(sampler) == parts[-1][1:]
        assert list(sampler) == parts[-1]
    assert {len(part) for part in parts} == {-(-count // size)}
    assert {number for part in parts for number in part} == set(range(count))
    dealt = [part[index] for index in range(len(parts[0])) for part in parts]
    assert dealt[:count] == torch.randperm(count, generator=torch.Generator().manual_seed(5)).tolist()


def test_an_endless_sampler_goes_on_where_it_was_told_to() -> None:
    whole = InfiniteSampler(range(7), seed=1)
    first = [number for number, _ in zip(whole, range(30), strict=False)]
    assert sorted(first[:7]) == sorted(first[7:14]) == list(range(7))
    whole.skip(11)
    assert [number for number, _ in zip(whole, range(19), strict=False)] == first[11:]


def test_default_collate_stacks_and_pseudo_collate_keeps_lists() -> None:
    samples = [{"x": torch.full((2,), i), "y": Pair(i, "abc"), "z": [i, 1.5]} for i in range(3)]
    stacked = default_collate(samples)
    assert stacked["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert stacked["y"].x.tolist() == [0, 1, 2]
    assert list(stacked["y"].y) == ["abc"] * 3
    assert [part.tolist() for part in stacked["z"]] == [[0, 1, 2], [1.5] * 3]
    loose = pseudo_collate(samples)
    assert [each.tolist() for each in loose["x"]] == stacked["x"].tolist()
    assert list(loose["y"].x) == [0, 1, 2]
    with refused(DataError, "batch", 1, 2):
        default_collate([[1], [1, 2]])


def test_images_are_normalised_swapped_and_padded_to_one_batch() -> None:
    mean, std = [1.0, 2.0, 3.0], [2.0, 4.0, 8.0]
    preprocess = ImgDataPreprocessor(mean=mean, std=std, pad_size_divisor=4, pad_value=9, bgr_to_rgb=True)
    images = [torch.rand(3, 5, 3), torch.rand(3, 2, 6)]
    batch = preprocess({"inputs": images, "data_samples": [1, 2]})["inputs"]
    assert batch.shape == (2, 3, 8, 8)
    expected = (images[0].flip(0) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(batch[0, :, :5, :3], expected)
    assert (batch[1, :, 2:] == 9).all()
    with refused(ConfigError, "`std`", key="data_preprocessor.mean"):
        ImgDataPreprocessor(mean=mean)


class Mean(BaseMetric):
    default_prefix = "my"

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.extend(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        return {"mean": sum(map(float, results)) / len(results), "count": len(results)}


def test_an_evaluator_joins_its_metrics_and_drops_what_was_dealt_twice() -> None:
    both = Evaluator([Mean(), Mean(prefix="other")])
    both.process([torch.tensor(1.0), torch.tensor(3.0), torch.tensor(5.0)])
    assert both.evaluate(2) == {"my/mean": 2.0, "my/count": 2, "other/mean": 2.0, "other/count": 2}
    same = Evaluator([Mean(), Mean()])
    same.process([torch.tensor(1.0)])
    with refused(ConfigError, "'my/mean'", key="evaluator.prefix"):
        same.evaluate(1)


def test_a_loader_is_built_from_its_description() -> None:
    sampler = {"type": "DefaultSampler", "shuffle": False}
    loader = build_dataloader(
        {"dataset": list(range(10)), "sampler": sampler, "batch_size": 2, "num_batch_per_epoch": 3}, seed=1
    )
    assert [list(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    with refused(ConfigError, "DefaultSampler", key="dataloader.sampler"):
        build_dataloader({"dataset": [1], "batch_size": 2})
    with refused(ConfigError, "`num_workers`", key="dataloader.num_worker"):
        build_dataloader({"dataset": [1], "sampler": sampler, "num_worker": 2})
