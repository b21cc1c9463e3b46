"""Generation with a model whose weights do not fit the device."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from plait.config import RunConfig
from plait.distributed import WeightStream, find_wrap_units, materialize, stream_weights
from plait.engine import build_module


def build_streamed(
    config: RunConfig, device: torch.device, *, tier: Literal["cpu", "nvme"], folder: Path | None = None
) -> tuple[nn.Module, WeightStream]:
    """Return the model, whose blocks' weights are on the host or in `folder`, and the stream that copies them.

    The weights are not loaded: copy them into what the stream's `tensors` returns. At any time, also while it is built,
    the device has the weights of at most one block besides those outside of blocks.
    """
    module, initializer = build_module(config, None)
    units = find_wrap_units(module, config.strategy.wrap)
    stream = stream_weights(module, units, device=device, tier=tier, folder=folder)
    if initializer is not None:
        materialize.initialize(module, initializer, seed=config.seed, device=device, buffers_only=True)
    return module.eval(), stream
