"""Llama: RoPE, RMSNorm, SwiGLU, grouped-query attention."""

from plait.models.llama.model import Llama

__all__ = ["Llama"]
