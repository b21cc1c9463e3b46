"""What a model keeps besides its parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from plait.torch_internals import non_persistent_buffers


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds, each under its first name; others are made from the configuration."""
    passing = {
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in non_persistent_buffers(module)
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in passing)
