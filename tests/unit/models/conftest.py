from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

Fill = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    """Other numbers in every run; a failing test shows the seed to repeat it with."""
    print("seed", torch.manual_seed(random.randrange(2**31)).initial_seed())


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fill() -> Fill:
    """Fill a model module by module, each under a seed of its name, as a strategy does."""

    def run(model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                torch.manual_seed(zlib.crc32(name.encode()))
                model.init_weights(module)
        return model

    return run


@pytest.fixture
def put() -> Callable[[nn.Module], Callable[[str, Tensor], None]]:
    """What a strategy does with a streamed tensor, for one process."""

    def into(model: nn.Module) -> Callable[[str, Tensor], None]:
        state = model.state_dict(keep_vars=True)

        def store(name: str, tensor: Tensor) -> None:
            with torch.no_grad():
                state[name].copy_(tensor)

        return store

    return into


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a `transformers` model to a folder, in several files where asked."""

    def save(model: Any, **options: Any) -> Path:
        model.save_pretrained(tmp_path, **options)
        return tmp_path

    return save
