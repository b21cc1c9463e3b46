"""Random numbers: seeds, deterministic mode, and the generators' state that a checkpoint stores."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int, rank: int) -> None:
    """Seed the generators of Python, NumPy and torch with a number that depends on `seed` and `rank`.

    So dropout differs between ranks. Initial weights do not depend on it: they have seeds of their own.
    """
    value = (seed * 1_000_003 + rank) % 2**32
    random.seed(value)
    np.random.seed(value)  # users' datasets draw from the legacy generator
    torch.manual_seed(value)


def make_deterministic() -> None:
    """Use torch's deterministic algorithms only; operations that have none raise an error."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of every generator of this rank, as tensors."""
    generator, key, position, gaussian, cached = np.random.get_state()
    assert generator == "MT19937"
    version, internal, gauss = random.getstate()
    assert version == 3
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(key).astype(np.int64)),
        "numpy_tail": torch.tensor([position, gaussian, cached], dtype=torch.float64),
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_tail": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore every generator of this rank to a state that `rng_state` returned."""
    torch.set_rng_state(state["torch"].to(torch.uint8))
    position, gaussian, cached = state["numpy_tail"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(gaussian), cached))
    has_gauss, gauss = state["python_tail"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8), device)
