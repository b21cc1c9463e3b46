"""Telling a language model's head to compute its backward products in 8 bits; see [Note: a head in 8 bits]."""

from __future__ import annotations

from torch import nn

from plait.errors import ModelError
from plait.models.common.fp8_loss import Fp8Head
from plait.models.common.head import LMHead
from plait.models.hf.head import head_of
from plait.models.hf.model import CausalLM
from plait.ops import MULTIPLE


def use_fp8_head(model: nn.Module, *, emulated: bool, traced: bool = False) -> None:
    """Have the head of `model`, Plait's own or a `transformers` decoder's, compute its gradients from 8-bit numbers.

    `traced`: the whole model will be compiled, where a `transformers` head makes logits. Such a model is refused; so is
    one whose head never goes straight to the loss, and one whose features are no multiple of 16.
    """
    found = [module for module in model.modules() if isinstance(module, LMHead | CausalLM)]
    if not found:
        raise _refusal(model, "has no head that goes from hidden states straight to the loss")
    for module in found:
        if isinstance(module, LMHead):
            features = module.features
        else:
            head = head_of(module)
            if head is None or not module.tiles_loss:
                raise _refusal(model, "does more with its logits than hand them on")
            if traced:
                raise _refusal(
                    model, "makes all logits where it is compiled as a whole (strategy.compile.scope: model)"
                )
            features = head.in_features
        if features % MULTIPLE:
            raise _refusal(model, f"has {features} features, and 8-bit products take multiples of {MULTIPLE}")
        module.fp8_head = Fp8Head(emulated)


def _refusal(model: nn.Module, reason: str) -> ModelError:
    return ModelError(
        f"precision.fp8.head: {type(model).__name__} {reason}. It is for Plait's language models and for decoders of "
        "`transformers`; leave it out"
    )
