"""`deepspeed.ops`: its optimizers, as torch's and Plait's own. None of them is compiled when first used."""

from plait.frontends.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
