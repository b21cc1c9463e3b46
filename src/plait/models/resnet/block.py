"""The two residual blocks. Attribute names are those of torchvision, so that weights can be exchanged."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.common.init import zero_start


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
        """Add what the convolutions find to the input."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Narrow by 1×1, convolve by 3×3 (which also strides), widen by 1×1; the block of the deeper ones."""

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
        """Add what the convolutions find to the input."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the image's size up to the stride; no bias, because a norm follows."""
    return nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)


def shortcut(channels: int, out: int, stride: int) -> nn.Sequential | None:
    """What brings a block's input to the shape of its output; nothing where that is the same."""
    if stride == 1 and channels == out:
        return None
    return nn.Sequential(convolution(channels, out, 1, stride), nn.BatchNorm2d(out))
