"""ResNet weights in the names of torchvision, which are ours too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from plait.models.common.weights import Put, stream_weights


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a folder of torchvision weights, saved as safetensors, into a `ResNet`; see `stream_weights`."""
    counters = r"\.num_batches_tracked$"  # not in files from before they existed
    return stream_weights(model, path, put, translate=from_torchvision, may_miss=[counters])


def from_torchvision(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """The same tensor under the same name."""
    yield name, tensor
