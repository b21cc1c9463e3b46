"""A Llama whose feed-forwards are mixtures of experts."""

from plait.models.moe.model import Moe

__all__ = ["Moe"]
