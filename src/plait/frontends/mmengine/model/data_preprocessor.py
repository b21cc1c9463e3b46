"""What happens to a batch between the loader and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import ConfigError, DataError, Problem
from plait.frontends.mmengine.registry import MODELS


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Moves a batch to the device where this module is."""

    _place: Tensor

    def __init__(self, non_blocking: bool | None = False) -> None:
        super().__init__()
        self._non_blocking = bool(non_blocking)
        # It goes where the model goes, and no checkpoint holds it.
        self.register_buffer("_place", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._place.device

    def cast_data(self, data: Any) -> Any:
        """Anything with tensors in it, with those on the device."""
        if isinstance(data, Mapping):
            return {key: self.cast_data(item) for key, item in data.items()}
        if isinstance(data, str | bytes) or data is None:
            return data
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self.cast_data(item) for item in data))
        if isinstance(data, Sequence):
            return type(data)(self.cast_data(item) for item in data)  # type: ignore[call-arg]
        if hasattr(data, "to") and callable(data.to):  # tensors, and elements that carry some
            return data.to(self.device, non_blocking=self._non_blocking)
        return data

    def forward(self, data: Any, training: bool = False) -> Any:
        """The batch as the model takes it."""
        return self.cast_data(data)


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Normalises images, swaps their colours, and pads them to one batch."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        pad_size_divisor: int = 1,
        pad_value: float = 0,
        bgr_to_rgb: bool = False,
        rgb_to_bgr: bool = False,
        non_blocking: bool | None = False,
    ) -> None:
        super().__init__(non_blocking)
        if bgr_to_rgb and rgb_to_bgr:
            raise ConfigError(
                Problem("data_preprocessor.bgr_to_rgb", "and `rgb_to_bgr` are both set", "Leave one out.")
            )
        if (mean is None) != (std is None):
            raise ConfigError(Problem("data_preprocessor.mean", "it goes with `std`", "Give both, or neither."))
        self._normalize = mean is not None and std is not None
        if mean is not None and std is not None:
            for key, values in (("mean", mean), ("std", std)):
                if len(values) not in (1, 3):
                    message = f"{list(values)} has {len(values)} values"
                    raise ConfigError(Problem(f"data_preprocessor.{key}", message, "Give one, or one a channel."))
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self._swap = bgr_to_rgb or rgb_to_bgr
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value

    def forward(self, data: Any, training: bool = False) -> Any:
        """A dict whose `inputs` are one normalised and padded batch."""
        data = self.cast_data(data)
        images = data["inputs"]
        if isinstance(images, Tensor):
            if images.ndim != 4:
                raise DataError(f"`inputs` has shape {tuple(images.shape)}, expected (batch, channels, height, width)")
            images = list(images)
        prepared = [self._prepare(image) for image in images]
        data["inputs"] = stack_batch(prepared, self.pad_size_divisor, self.pad_value)
        data.setdefault("data_samples", None)
        return data

    def _prepare(self, image: Tensor) -> Tensor:
        if self._swap:
            image = image[[2, 1, 0], ...]
        image = image.float()
        return (image - self.mean) / self.std if self._normalize else image


def stack_batch(images: Sequence[Tensor], pad_size_divisor: int = 1, pad_value: float = 0) -> Tensor:
    """Images (channels, height, width) as one batch, padded at the right and the bottom."""

    def up(size: int) -> int:
        return -(-size // pad_size_divisor) * pad_size_divisor

    height, width = (up(max(image.shape[axis] for image in images)) for axis in (-2, -1))
    padded = [
        F.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]), value=pad_value) for image in images
    ]
    return torch.stack(padded)
