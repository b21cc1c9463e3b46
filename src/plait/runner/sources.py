"""From the sections and objects a user gives to loaders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from plait.config import ResolvedBatch, RunConfig, resolve_batch
from plait.config.train import BatchConfig
from plait.data import Loader, adopt, build_dataset, is_stream
from plait.world import World


def is_section(value: Any) -> bool:
    """Whether data were described (`{type: …}`) rather than given."""
    return isinstance(value, Mapping) and "type" in value


def batch_of(config: RunConfig, world: World, given: Any) -> ResolvedBatch:
    """The batch sizes; a DataLoader's own batch size is the micro-batch where the section does not say."""
    section = config.batch
    if isinstance(given, DataLoader) and section.micro is None and (section.total is None or section.accumulation is None):
        section = BatchConfig(total=section.total, micro=adopt(given).micro, accumulation=section.accumulation)
    return resolve_batch(section, world.layout.data_parallel)


def make_loader(
    role: str, config: RunConfig, world: World, batch: ResolvedBatch, *, given: Any, collate: Any = None
) -> Loader | None:
    """The loader of `data`, `val_data` or `test_data`; None where there are no such data."""
    training = role == "data"
    section = getattr(config, role)
    common: dict[str, Any] = {
        "rank": world.rank,
        "ranks": world.layout.data_parallel,
        "seed": config.seed,
        "batch": batch if training else ResolvedBatch(batch.micro * world.layout.data_parallel, batch.micro, 1),
    }
    if section is not None:
        # One rank prepares what all read (tokenized files, for example); the others find it ready.
        if world.is_main:
            build_dataset(section, training=training, seed=config.seed)
        world.barrier()
        pinned = section.pin_memory if section.pin_memory is not None else world.device.type == "cuda"
        return Loader(
            build_dataset(section, training=training, seed=config.seed),
            shuffle=training if section.shuffle is None else section.shuffle,
            drop_last=section.drop_last,
            workers=section.workers,
            pin_memory=pinned,
            collate=collate,
            **common,
        )
    if given is None:
        return None
    if isinstance(given, DataLoader):
        if not training:
            micro = adopt(given).micro
            common["batch"] = ResolvedBatch(micro * world.layout.data_parallel, micro, 1)
        return Loader.from_dataloader(given, **common)
    return Loader(
        given,
        shuffle=training and not is_stream(given),
        pin_memory=world.device.type == "cuda",
        collate=collate,
        **common,
    )
