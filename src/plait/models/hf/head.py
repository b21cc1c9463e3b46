"""The last layer of a `transformers` decoder, made to finish the loss where all logits would be too many.

[Note: a loss without logits] `transformers` computes all logits first. For the length of one call the head's `forward`
is replaced by one that goes from hidden states straight to the loss, in tiles of tokens; see [Note: chunked loss] in
`models.common.chunked_loss`. The head is still called where the model calls it, so whatever is done around its call (a
weight that is gathered for it) happens as before. That is right only if the model hands the head's answer on as it is.
Whether it does is tried once, when the model is built, with everything before the head left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.common.fp8_loss import Fp8Head
from plait.models.common.loss import PLAIN_BYTES, linear_cross_entropy
from plait.spec import LossTerm
from plait.torch_internals import forward_hooks
from plait.world import is_sharded


def hands_on_its_logits(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a decoder's own `forward` answers with what its head gave it; False where that cannot be told."""
    head, body = head_of(model), _body_of(model)
    if head is None or body is None or head.bias is not None:
        return False
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    # The sizes do not matter: nothing is computed with them.
    answer = torch.zeros(1, 1, 1, device="cpu")
    before = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=torch.zeros(1, 1, 1, device="cpu"))
    before.router_logits = None
    with _instead(body, lambda *_, **__: before), _instead(head, lambda *_, **__: answer):
        try:
            output = forward(model, torch.zeros(1, 1, dtype=torch.long, device="cpu"), return_dict=True)
        except Exception:  # whatever it needs from its body that was not there
            return False
    return getattr(output, "logits", None) is answer


def are_many(model: nn.Module, labels: Tensor, fp8: Fp8Head | None) -> bool:
    """Whether the logits of these labels are better never whole, and need not be; with `fp8` any are."""
    head = head_of(model)
    if head is None or is_sharded(head.weight) or torch.compiler.is_compiling():
        return False
    if "forward" in vars(head) or any(forward_hooks(head)):
        return False  # somebody does more there than multiply
    return fp8 is not None or labels.numel() * head.out_features * head.weight.element_size() > PLAIN_BYTES


@contextmanager
def loss_at_the_head(model: nn.Module, labels: Tensor, fp8: Fp8Head | None) -> Iterator[list[LossTerm]]:
    """While this lasts, the head answers with the sum of the losses; the list will hold the whole term."""
    head = head_of(model)
    assert head is not None
    found: list[LossTerm] = []

    def finish(hidden: Tensor) -> Tensor:
        found.append(linear_cross_entropy(hidden, head.weight, labels, fp8=fp8))
        return found[-1].sum

    with _instead(head, finish):
        yield found


def head_of(model: Any) -> nn.Linear | None:
    """The last layer of a `transformers` model, where that is a plain linear one."""
    head = model.get_output_embeddings()
    return head if type(head) is nn.Linear else None


def _body_of(model: Any) -> nn.Module | None:
    body = getattr(model, model.base_model_prefix, None)
    return body if isinstance(body, nn.Module) else None


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
