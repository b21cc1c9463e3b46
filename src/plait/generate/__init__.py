"""Text from a trained model, or from one in training."""

from plait.generate.generator import Generator, generate
from plait.generate.guard import Comparison, compare_logprobs
from plait.generate.hybrid import HybridEngine
from plait.generate.options import Completion, Sampling
from plait.generate.sample import sample

__all__ = [
    "Comparison",
    "Completion",
    "Generator",
    "HybridEngine",
    "Sampling",
    "compare_logprobs",
    "generate",
    "sample",
]
