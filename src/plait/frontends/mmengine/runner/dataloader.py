"""From `train_dataloader=dict(dataset=…, sampler=…, batch_size=…)` to a loader."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.dataset import worker_init_fn
from plait.frontends.mmengine.dist import get_rank, get_world_size
from plait.frontends.mmengine.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, check_arguments


class FirstOf:
    """The first samples of a data set; what else it has is the data set's own."""

    def __init__(self, dataset: Any, length: int) -> None:
        self._dataset = dataset
        self._length = min(length, len(dataset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return self._length


def build_dataloader(
    cfg: Any, *, seed: int | None = None, diff_rank_seed: bool = False, start_method: str | None = None
) -> Any:
    """A loader from its description; one that is a loader already stays as it is."""
    if not isinstance(cfg, Mapping):
        return cfg
    options = dict(cfg)
    dataset = _dataset(options)
    sampler = _sampler(options, dataset, None if diff_rank_seed else seed)
    grouped = options.pop("batch_sampler", None)
    if isinstance(grouped, Mapping):
        more = {"sampler": sampler, "batch_size": options.pop("batch_size", 1)}
        grouped = DATA_SAMPLERS.build(grouped, default_args=more)
    chosen = {"batch_sampler": grouped} if grouped is not None else {"sampler": sampler}
    workers = int(options.get("num_workers", 0))
    init = _worker_init(options, workers, seed)
    collate = _function(options.pop("collate_fn", {"type": "pseudo_collate"}), "collate_fn")
    if workers and start_method is not None:
        options.setdefault("multiprocessing_context", start_method)
    check_arguments("dataloader", DataLoader, options)
    # A generator of its own: starting a pass draws a number, which must not come out of the model's dropout.
    options.setdefault("generator", torch.Generator().manual_seed(seed or 0))
    return DataLoader(dataset, collate_fn=collate, worker_init_fn=init, **chosen, **options)


def _dataset(options: dict[str, Any]) -> Any:
    if "dataset" not in options:
        raise ConfigError(Problem("dataloader.dataset", "there is none", "Give a data set, or a dict with a type."))
    dataset = DATASETS.build(options.pop("dataset"))
    if hasattr(dataset, "full_init"):
        dataset.full_init()
    batches = options.pop("num_batch_per_epoch", None)
    if batches is not None:
        dataset = FirstOf(dataset, int(batches) * int(options.get("batch_size", 1)) * get_world_size())
    return dataset


def _sampler(options: dict[str, Any], dataset: Any, seed: int | None) -> Any:
    sampler = options.pop("sampler", None)
    if sampler is None and options.get("batch_sampler") is None:
        message = "there is none, and without one every rank would see the same samples"
        remedy = "Write sampler=dict(type='DefaultSampler', shuffle=True)."
        raise ConfigError(Problem("dataloader.sampler", message, remedy))
    return DATA_SAMPLERS.build(sampler, default_args={"dataset": dataset, "seed": seed})


def _worker_init(options: dict[str, Any], workers: int, seed: int | None) -> Any:
    quiet = bool(options.pop("disable_subprocess_warning", False))
    given = options.pop("worker_init_fn", None)
    if given is not None:
        return _function(given, "worker_init_fn")
    if seed is None:
        return None
    return partial(worker_init_fn, num_workers=workers, rank=get_rank(), seed=seed, disable_subprocess_warning=quiet)


def _function(given: Any, key: str) -> Any:
    """A function, by itself or as a dict with its name and options."""
    if isinstance(given, Mapping):
        options = dict(given)
        kind = options.pop("type", None)
        function = FUNCTIONS.get(kind) if isinstance(kind, str) else kind
        given = partial(function, **options) if options and callable(function) else function
    if not callable(given):
        message = f"{given!r} is no function"
        raise ConfigError(Problem(f"dataloader.{key}", message, "Give one, or a dict with its name as `type`."))
    return given
