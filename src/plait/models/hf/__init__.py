"""Any `transformers` model, unedited. The only package of Plait's models that imports `transformers`."""

from plait.models.hf.model import build_hf_model
from plait.models.hf.weights import load_pretrained

__all__ = ["build_hf_model", "load_pretrained"]
