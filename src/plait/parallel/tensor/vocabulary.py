"""The vocabulary, shared by the ranks: embedding and output head.

The vocabulary need not divide by the number of ranks: the last rank then has fewer words. Nothing is padded, so the
stored shape stays what it is.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from plait.errors import Problem
from plait.parallel.tensor import moves
from plait.parallel.tensor.linear import is_linear, out_features
from plait.parallel.tensor.parameters import SIZE_KEY, own, part_of
from plait.parallel.tensor.style import Style
from plait.torch_internals import tree_map


class VocabEmbedding(Style):
    """Each rank looks up the words it has; a word that it has not is zero, and the ranks' results are added."""

    def problems(self) -> list[Problem]:
        """Options of `nn.Embedding` that look at the whole table cannot be had in parts."""
        module = self.site.module
        if not isinstance(module, nn.Embedding):
            return self.wrong_module("an nn.Embedding")
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return self.wrong_module("an nn.Embedding without max_norm, scale_grad_by_freq and sparse")
        return _too_few_words(self, module.num_embeddings)

    def place(self) -> None:
        """Split the table by words."""
        module = self.site.module
        assert isinstance(module, nn.Embedding)
        start, count = part_of(module.num_embeddings, self.site.size, self.site.rank)
        self.site.placed.split(module, "weight", 0)
        padding = module.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < start + count else None

        def forward(input: Tensor) -> Tensor:
            place = input - start
            mine = (place >= 0) & (place < count)
            found = _look_up(module, place.where(mine, 0), own_padding)
            # A word of another rank has found the first row here.
            return moves.total(found.masked_fill(~mine[..., None], 0.0), self.site.group)

        setattr(module, "forward", forward)  # noqa: B010


def _look_up(module: nn.Embedding, rows: Tensor, padding: int | None) -> Tensor:
    """Vectors from this rank's part of the table, and what a subclass does to each of them."""
    table = own(module, "weight")
    assert table is not None
    if type(module).forward is nn.Embedding.forward:
        return F.embedding(rows, table, padding)
    whole = module._parameters["weight"], module.padding_idx
    module._parameters["weight"], module.padding_idx = table, padding  # type: ignore[assignment]
    try:
        return type(module).forward(module, rows)
    finally:
        module._parameters["weight"], module.padding_idx = whole


class VocabHead(Style):
    """Each rank computes the logits of the words it has.

    A plain linear layer answers with a DTensor that is split along the vocabulary, from which
    `models.common.loss.cross_entropy` computes the loss without gathering. Another module gets its weight as a
    DTensor and is expected to know what to do with it, as `models.common.head.LMHead` does.
    """

    def problems(self) -> list[Problem]:
        """Every rank needs at least one word."""
        module = self.site.module
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim != 2:
            return self.wrong_module("a head with a weight of (words, features)")
        return [] if weight is None else _too_few_words(self, weight.shape[0])

    def place(self) -> None:
        """Split the weight by words; a tied head has none, and is called with the embedding's."""
        site, module = self.site, self.site.module
        site.placed.split(module, "weight", 0)
        if is_linear(module):
            site.placed.split(module, "bias", 0)
            module.forward = self._linear
            return
        inner = module.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            weights = (module._parameters.get("weight"), *args, *kwargs.values())
            # A head that is tied to an embedding which no rank has a part of does whole work.
            shared = any(isinstance(weight, DTensor) for weight in weights)
            return inner(moves.spread(hidden, site.group) if shared else hidden, *args, **kwargs)

        module.forward = forward

    def _linear(self, hidden: Tensor) -> Tensor:
        site, module = self.site, self.site.module
        weight = own(module, "weight")
        assert weight is not None
        logits = F.linear(moves.spread(hidden, site.group), weight, own(module, "bias"))
        shape = (*logits.shape[:-1], out_features(module))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            logits, site.mesh, [Shard(logits.ndim - 1)], run_check=False, shape=torch.Size(shape), stride=stride
        )


def answer_whole(model: nn.Module) -> None:
    """Have the model's callers see whole tensors where it would answer with DTensors (logits, without labels)."""
    inner = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, inner(*args, **kwargs))

    model.forward = forward


def _too_few_words(style: Style, words: int) -> list[Problem]:
    size = style.site.size
    if part_of(words, size, size - 1)[1] > 0:
        return []
    message = f"{size} ranks cannot share the {words} words of {style.site.name!r}: some would have none"
    return [Problem(SIZE_KEY, message, "Use fewer ranks for it.")]
