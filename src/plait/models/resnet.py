"""ResNet: the model, its named sizes, and its weights in the naming of torchvision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import ResNetConfig
from plait.models.common.init import start_scale, zero_start
from plait.models.common.losses import cross_entropy
from plait.models.common.weights import Put, stream_weights

# The two residual blocks. Attribute names are those of torchvision, so that weights can be exchanged.


class BasicBlock(nn.Module):
    """Two 3×3 convolutions; the block of depths 18 and 34."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3)
        self.bn2 = zero_start(nn.BatchNorm2d(width))
        self.downsample = shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input (or its projection) plus the output of the convolutions."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """A 1×1 convolution to fewer channels, a 3×3 with the stride, a 1×1 to more; the block of depths from 50 on."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, width * self.expansion, 1)
        self.bn3 = zero_start(nn.BatchNorm2d(width * self.expansion))
        self.downsample = shortcut(channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input (or its projection) plus the output of the convolutions."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with "same" padding, and without bias, because a norm follows."""
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(channels: int, out: int, stride: int) -> nn.Sequential | None:
    """Return the projection from the shape of a block's input to that of its output; None where they are equal."""
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(convolution(channels, out, 1, stride), nn.BatchNorm2d(out))


# Named depths, as keywords of `ResNetConfig`, and the blocks that each depth has in its four stages.


STAGES: Mapping[int, tuple[int, int, int, int]] = MappingProxyType(
    {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
)

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **{f"resnet{depth}": {"depth": depth} for depth in STAGES},
        "cifar10": {"depth": 18, "classes": 10, "stem": "cifar"},
    }
)


class ResNet(nn.Module):
    """A residual network; its forward pass returns logits, and with labels the loss too."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (BasicBlock, Bottleneck)

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        block = BasicBlock if config.depth < 50 else Bottleneck
        large = config.stem == "imagenet"
        self.conv1 = convolution(3, 64, 7, stride=2) if large else convolution(3, 64, 3)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        one, two, three, four = STAGES[config.depth]
        wide = block.expansion
        self.layer1 = _stage(block, one, channels=64, width=64, stride=1)
        self.layer2 = _stage(block, two, channels=64 * wide, width=128, stride=2)
        self.layer3 = _stage(block, three, channels=128 * wide, width=256, stride=2)
        self.layer4 = _stage(block, four, channels=256 * wide, width=512, stride=2)
        self.fc = nn.Linear(512 * wide, config.classes)
        self.apply(self.init_weights)

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor | dict[str, Any]:
        """Return logits of images (batch, 3, height, width); with labels `{"loss": LossTerm, "logits": …}`."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(image))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        if label is None:
            return logits
        return {"loss": cross_entropy(logits, label), "logits": logits}

    def init_weights(self, module: nn.Module) -> None:
        """Initialize one module; the last norm of a block starts at zero, so the block starts as the identity."""
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
            nn.init.constant_(module.weight, start_scale(module))
        elif isinstance(module, nn.Linear):
            module.reset_parameters()


def _stage(
    block: type[BasicBlock] | type[Bottleneck], count: int, *, channels: int, width: int, stride: int
) -> nn.Sequential:
    """Return `count` blocks; only the first has a stride and changes the number of channels."""
    first = block(channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(count - 1)))


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a folder of torchvision weights, saved as safetensors, into a `ResNet`; see `stream_weights`."""
    counters = r"\.num_batches_tracked$"  # older files do not have them
    return stream_weights(model, path, put, translate=from_torchvision, may_miss=[counters])


def from_torchvision(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Yield the same tensor under the same name."""
    yield name, tensor
