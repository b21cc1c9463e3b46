"""Data preprocessors, and models with their own train, validation and test step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import ConfigError, DataError, ModelError, Problem
from plait.frontends.mmengine.registry import MODELS

# Data preprocessors, which process a batch before the model.


@MODELS.register_module()
class BaseDataPreprocessor(nn.Module):
    """Moves a batch to the device of this module."""

    _device_marker: Tensor

    def __init__(self, non_blocking: bool | None = False) -> None:
        super().__init__()
        self._non_blocking = bool(non_blocking)
        # A buffer that moves with the model, so that its device is known; not saved in checkpoints.
        self.register_buffer("_device_marker", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """The device that batches are moved to."""
        return self._device_marker.device

    def cast_data(self, data: Any) -> Any:
        """Return nested data with its tensors on the device."""
        if isinstance(data, Mapping):
            return {key: self.cast_data(item) for key, item in data.items()}
        if isinstance(data, str | bytes) or data is None:
            return data
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*(self.cast_data(item) for item in data))
        if isinstance(data, Sequence):
            return type(data)(self.cast_data(item) for item in data)  # type: ignore[call-arg]
        if hasattr(data, "to") and callable(data.to):  # tensors, and data elements
            return data.to(self.device, non_blocking=self._non_blocking)
        return data

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return the batch on the device."""
        return self.cast_data(data)


@MODELS.register_module()
class ImgDataPreprocessor(BaseDataPreprocessor):
    """Normalizes images, swaps their color channels, and pads them to one size, as one batch."""

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
            raise ConfigError(Problem("data_preprocessor.mean", "goes with `std`", "Set both, or neither."))
        self._normalize = mean is not None and std is not None
        if mean is not None and std is not None:
            for key, values in (("mean", mean), ("std", std)):
                if len(values) not in (1, 3):
                    message = f"{list(values)} has {len(values)} values"
                    raise ConfigError(Problem(f"data_preprocessor.{key}", message, "Set one, or one per channel."))
            self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
            self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)
        self._swap = bgr_to_rgb or rgb_to_bgr
        self.pad_size_divisor = pad_size_divisor
        self.pad_value = pad_value

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return `data`, on the device, with its `inputs` as one normalized and padded tensor."""
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
    """Return images (channels, height, width) as one batch, padded at the right and the bottom."""

    def rounded_up(size: int) -> int:
        return -(-size // pad_size_divisor) * pad_size_divisor

    height, width = (rounded_up(max(image.shape[axis] for image in images)) for axis in (-2, -1))
    padded = [
        F.pad(image, (0, width - image.shape[-1], 0, height - image.shape[-2]), value=pad_value) for image in images
    ]
    return torch.stack(padded)


# Models.


class BaseModule(nn.Module):
    """A module with `init_weights`, which is called once before training."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()
        if init_cfg is not None:
            message = f"{init_cfg!r}: initializer configurations are not supported"
            raise ConfigError(Problem("model.init_cfg", message, "Override `init_weights`, or use `load_from`."))
        self.init_cfg = None
        self._is_init = False

    @property
    def is_init(self) -> bool:
        """Whether `init_weights` was called."""
        return self._is_init

    def init_weights(self) -> None:
        """Initialize the child modules; override it to initialize this one."""
        if self._is_init:
            return
        self._is_init = True
        for child in self.children():
            if isinstance(child, BaseModule):
                child.init_weights()


class BaseModel(BaseModule):
    """The base class of models: `forward(..., mode)` returns losses, predictions or tensors."""

    def __init__(self, data_preprocessor: Any = None, init_cfg: Any = None) -> None:
        super().__init__(init_cfg)
        if data_preprocessor is None:
            data_preprocessor = BaseDataPreprocessor()
        self.data_preprocessor = MODELS.build(data_preprocessor)

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """Run forward and backward, and the update if accumulation is complete; return the values to log."""
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            losses = self._run_forward(data, mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: Any) -> Any:
        """Return predictions for the evaluator."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: Any) -> Any:
        """Return predictions for the evaluator."""
        return self._run_forward(self.data_preprocessor(data, False), mode="predict")

    def parse_losses(self, losses: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the values with `loss` in their names, and what to log: that sum and each value's mean."""
        means: dict[str, Tensor] = {}
        for name, value in losses.items():
            tensors = [value] if isinstance(value, Tensor) else list(value) if isinstance(value, list | tuple) else []
            if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
                raise ModelError(
                    f"{type(self).__name__} returned {name!r} as a {type(value).__name__} in mode 'loss': "
                    "return a tensor, or a list of them"
                )
            first, *others = (tensor.mean() for tensor in tensors)
            means[name] = sum(others, first)
        summed = [value for name, value in means.items() if "loss" in name]
        if not summed:
            raise ModelError(
                f"{type(self).__name__} returned {', '.join(means) or 'nothing'} in mode 'loss', and no name "
                "contains `loss`: return a loss to minimize"
            )
        total = sum(summed[1:], summed[0])
        return total, {"loss": total, **{name: value for name, value in means.items() if name != "loss"}}

    def _run_forward(self, data: Any, mode: str) -> Any:
        """Return the outputs for a batch; the runner replaces this method, to call the model through its engine."""
        return call_with(self, data, mode)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return losses in mode `loss`, predictions in mode `predict`, anything in mode `tensor`."""


def call_with(call: Any, data: Any, mode: str) -> Any:
    """Return a model's outputs for a batch: a dict is passed as keyword arguments, a list or tuple as positional."""
    if isinstance(data, Mapping):
        return call(**data, mode=mode)
    if isinstance(data, list | tuple):
        return call(*data, mode=mode)
    raise ModelError(f"the data preprocessor returned a {type(data).__name__}: return a list, a tuple or a dict")
