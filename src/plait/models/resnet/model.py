"""The whole of ResNet."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import ResNetConfig
from plait.models.common.init import start_scale
from plait.models.common.loss import cross_entropy
from plait.models.resnet.block import BasicBlock, Bottleneck, convolution
from plait.models.resnet.presets import STAGES


class ResNet(nn.Module):
    """A residual network; answers images with logits, labelled images with loss and logits."""

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
        """Logits of images (batch, 3, height, width); with labels `{"loss": LossTerm, "logits": logits}`."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(image))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        if label is None:
            return logits
        return {"loss": cross_entropy(logits, label), "logits": logits}

    def init_weights(self, module: nn.Module) -> None:
        """Fill one module; the last norm of a block starts at zero, so the block starts as the identity."""
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
    """`count` blocks, of which only the first strides and changes the number of channels."""
    first = block(channels, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(count - 1)))
