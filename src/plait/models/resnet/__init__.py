"""Residual networks for image classification."""

from plait.models.resnet.model import ResNet

__all__ = ["ResNet"]
