"""Random numbers: reproducible, different by rank, and restorable."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from plait.distributed import make_deterministic, restore_rng_state, rng_state, seed_everything

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _untouched_generators() -> Iterator[None]:
    state = rng_state(CPU)
    yield
    restore_rng_state(state, CPU)


def draws() -> tuple[list[float], ...]:
    """Of every generator, uniform and normal numbers: normal ones are made in pairs, and one is kept for later."""
    return (
        torch.rand(3).tolist() + torch.randn(3).tolist(),
        [*np.random.random(3), *np.random.standard_normal(3)],
        [random.random(), random.gauss(0, 1), random.gauss(0, 1), random.gauss(0, 1)],
    )


@pytest.mark.parametrize("odd_normals", [0, 1])
def test_every_generator_goes_on_from_a_stored_state(odd_normals: int) -> None:
    seed_everything(random.randrange(2**31), 0)
    for _ in range(odd_normals):  # leaves a spare normal number behind, which is part of the state
        random.gauss(0, 1)
        np.random.standard_normal()
    state = rng_state(CPU)
    first = draws()
    assert draws() != first
    restore_rng_state(state, CPU)
    assert draws() == first


def test_the_state_is_tensors_and_survives_being_written(tmp_path: object) -> None:
    state = rng_state(CPU)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    path = os.path.join(str(tmp_path), "rng.pt")
    torch.save(state, path)
    first = draws()
    restore_rng_state(torch.load(path, weights_only=True), CPU)
    assert draws() == first


def test_a_seed_gives_the_same_numbers_and_ranks_give_different_ones() -> None:
    seed = random.randrange(2**40)
    found = []
    for rank in (0, 1, 0, 2):
        seed_everything(seed, rank)
        found.append(draws())
    assert found[0] == found[2]
    for generator in range(3):
        assert len({str(f[generator]) for f in found}) == 3
    seed_everything(seed + 1, 0)
    assert all(a != b for a, b in zip(draws(), found[0], strict=True))


def test_ranks_of_neighbouring_seeds_do_not_share_numbers() -> None:
    seen = set()
    for seed in range(4):
        for rank in range(64):
            seed_everything(seed, rank)
            seen.add(torch.initial_seed())
    assert len(seen) == 4 * 64


def test_deterministic_mode_refuses_operations_that_have_no_such_version() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is False
        assert torch.backends.cudnn.benchmark is False
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.empty(4).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def test_a_deterministic_run_gives_the_same_bits_twice() -> None:
    script = """
import torch
from torch import nn
from plait.config import parse_sections
from plait.engine import Preparation, prepare_native
from plait.distributed import open_world
def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1))
config = parse_sections(seed=5, deterministic=True, device="cpu").config
given = Preparation(config, open_world(config), model=model, loss_function=lambda out, _: out.square().mean())
engine = prepare_native(given)
assert torch.are_deterministic_algorithms_enabled()
inputs = torch.linspace(-1, 1, 64).view(8, 8)
print([engine.train_step([inputs]).loss.hex() for _ in range(3)])
"""
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(2)]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout
