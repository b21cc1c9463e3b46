"""GPT-2: learned positions, LayerNorm, GELU, tied embeddings."""

from plait.models.gpt.model import Gpt

__all__ = ["Gpt"]
