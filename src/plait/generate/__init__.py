"""Text from a trained model."""

from plait.generate.sample import sample

__all__ = ["sample"]
