"""Real gloo ranks have the resident memory, and send the bytes, that their simulated step says."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint import CheckpointWriter, entries, load_into, open_checkpoint
from plait.config import parse_sections
from plait.config.run import RunConfig
from plait.distributed import open_world
from plait.engine import Engine, Preparation, prepare_native
from plait.launch import Phase
from plait.plan.hardware import find_hardware
from plait.plan.ledger import TIGHT_MALLOC
from plait.plan.simulate import simulate
from tests.multi.ranks import RankPool
from tests.traffic import SentBytes

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "zero2": "zero2",
    "zero3": "zero3",
    "tp": {"layout": {"tp": 2}},
    "pp": {"layout": {"pp": 2}},
    "cp": {"layout": {"cp": 2}},
}
SMALL = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48, "seq_len": 16}
LARGE = {"vocab_size": 8000, "dim": 512, "layers": 4, "heads": 8, "ffn_dim": 1408, "seq_len": 64}
TRIM, THRESHOLD = -1, -3
"""glibc's numbers for the two settings of `TIGHT_MALLOC`, as `mallopt` takes them."""


def config_of(strategy: Any, sizes: dict[str, int], optim: str = "AdamW") -> RunConfig:
    return parse_sections(
        model={"type": "llama", **sizes},
        batch={"micro": 2, "accumulation": 2},
        strategy=strategy,
        optim={"type": optim},
        train={"clip_norm": 1.0},
        device="cpu",
    ).config


def take_a_step(config: RunConfig, engine: Engine) -> None:
    sizes: Any = config.model
    ids = torch.randint(0, sizes.vocab_size, (2, 2, 2, sizes.seq_len))
    engine.train_step([{"input_ids": inputs, "labels": labels} for inputs, labels in ids])


def train(config: RunConfig, steps: int) -> SentBytes:
    """Some steps; what the last one sent."""
    with open_world(config) as world:
        engine = prepare_native(Preparation(config, world, accumulation=2))
        for _ in range(steps):
            with SentBytes() as sent:
                take_a_step(config, engine)
        return sent


def simulated(config: RunConfig) -> list[Any]:
    found, received = [], None
    for rank in range(2):
        seen = simulate(config, find_hardware("cpu"), ranks=2, rank=rank, received=received)
        received = seen.sent_spec
        found.append(seen.ledger)
    return found


# ---- what is sent


def bytes_sent(rank: int, size: int, strategy: Any) -> float:
    return train(config_of(strategy, SMALL), steps=2).bytes


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_send_what_was_simulated(two_ranks: RankPool, name: str) -> None:
    expected = [account.total("sent") for account in simulated(config_of(STRATEGIES[name], SMALL))]
    assert two_ranks.run(bytes_sent, STRATEGIES[name]) == expected


# ---- what is held


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[RankPool]:
    """Ranks that have done nothing before."""
    pool = RankPool(2)
    yield pool
    pool.close()


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def give_back_what_is_free() -> int:
    """Bytes that the process has then; from now on it gives back at once."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(THRESHOLD, int(TIGHT_MALLOC["MALLOC_MMAP_THRESHOLD_"]))
    assert libc.mallopt(TRIM, int(TIGHT_MALLOC["MALLOC_TRIM_THRESHOLD_"]))
    gc.collect()
    libc.malloc_trim(0)
    return resident("VmRSS")


def begin_anew() -> None:
    """The peak starts over."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_growth(rank: int, size: int, strategy: Any) -> int:
    """How far resident memory rises above that of the process, which a small run has made ready."""
    give_back_what_is_free()
    train(config_of(strategy, SMALL), steps=2)
    before = give_back_what_is_free()
    begin_anew()
    train(config_of(strategy, LARGE), steps=3)
    gc.collect()
    return resident("VmHWM") - before


needs_glibc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="needs Linux with glibc",
)


@needs_glibc
@pytest.mark.parametrize("name", ["ddp", "zero3", "pp"])
def test_resident_memory_rises_as_far_as_was_simulated(fresh_ranks: RankPool, name: str) -> None:
    expected = [account.peak[1] for account in simulated(config_of(STRATEGIES[name], LARGE))]
    for measured, predicted in zip(fresh_ranks.run(peak_growth, STRATEGIES[name]), expected, strict=True):
        assert measured == pytest.approx(predicted, rel=0.1)


# ---- what saving and loading hold

CHECKPOINTS: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "zero3": "zero3",
    "offload": {"zero": 1, "offload": "cpu"},
}


def save_and_load(config: RunConfig, target: Path, *, background: bool) -> tuple[int, int]:
    """The peaks of a process that trains and saves, and of one that goes on from that."""
    with open_world(config) as world:
        engine = prepare_native(Preparation(config, world, accumulation=2))
        take_a_step(config, engine)
        writer = CheckpointWriter(target.parent, world, background=background)
        give_back_what_is_free()
        begin_anew()
        writer.save(target, engine.state_entries(), {}, step=1)
        writer.wait()
        saving = resident("VmHWM")
        writer.close()
        del engine, writer
        engine = prepare_native(Preparation(config, world, accumulation=2))
        give_back_what_is_free()
        begin_anew()
        checkpoint = open_checkpoint(target)
        engine.allocate_optimizer_state(entries(checkpoint.index, "optim."))
        load_into(checkpoint, engine.state_entries(), world=world)
        engine.state_loaded()
        return saving, resident("VmHWM")


def checkpoint_growth(rank: int, size: int, strategy: Any, optim: str, folder: str, background: bool) -> list[int]:
    give_back_what_is_free()
    save_and_load(config_of(strategy, SMALL, optim), Path(folder) / "small", background=background)
    before = give_back_what_is_free()
    peaks = save_and_load(config_of(strategy, LARGE, optim), Path(folder) / "large", background=background)
    return [peak - before for peak in peaks]


@needs_glibc
@pytest.mark.parametrize(
    ("name", "optim", "background"),
    [
        ("ddp", "AdamW", False),
        ("ddp", "AdamW", True),
        ("zero1", "AdamW", False),
        ("zero3", "AdamW", True),
        ("offload", "AdamW", False),
        ("ddp", "AdamW8bit", False),
        ("offload", "AdamW8bit", False),
    ],
)
def test_saving_and_loading_take_the_resident_memory_that_was_simulated(
    fresh_ranks: RankPool, tmp_path: Path, name: str, optim: str, background: bool
) -> None:
    config = config_of(CHECKPOINTS[name], LARGE, optim)
    settings = config.checkpoint.model_copy(update={"async_save": background})
    config = config.model_copy(update={"checkpoint": settings})
    machine = replace(find_hardware("cpu"), host_cores=os.cpu_count() or 1)  # who write and read at once are threads
    peaks = simulate(config, machine, ranks=2).ledger.peaks()
    for saving, loading in fresh_ranks.run(checkpoint_growth, CHECKPOINTS[name], optim, str(tmp_path), background):
        assert saving == pytest.approx(peaks[Phase.SAVE], rel=0.1)
        assert loading == pytest.approx(peaks[Phase.LOAD], rel=0.1)
