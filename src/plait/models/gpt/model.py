"""The whole of GPT."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import GptConfig
from plait.errors import ModelError
from plait.models.common.attention import Shared
from plait.models.common.documents import packing_mask
from plait.models.common.flops import decoder_flops_per_token
from plait.models.common.head import LMHead
from plait.models.common.init import init_lm_module
from plait.models.common.plan import decoder_plan
from plait.models.gpt.block import GptBlock
from plait.spec import LossTerm


class Gpt(nn.Module):
    """A GPT-2 decoder; keeps the protocol of `models.common.protocol.LanguageModel`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (GptBlock,)

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.seq_len, config.dim)
        self.blocks = nn.ModuleList(GptBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.head = LMHead(config.dim, config.vocab_size, tied=config.tie_embeddings)
        self.make_mask = packing_mask
        """From document ids to what attention is given as a mask; goes with `Attention.attend`."""
        self.apply(self.init_weights)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor | LossTerm:
        """Loss where labels are given, logits where not.

        A model without its first layers starts from `hidden`; one without its head answers with hidden states.
        """
        if positions is None:
            tokens = input_ids.shape[1]
            if tokens > self.config.seq_len:
                raise ModelError(
                    f"a row of {tokens} tokens is longer than model.seq_len={self.config.seq_len}, "
                    "and learned positions end there; raise model.seq_len or shorten the rows"
                )
            positions = torch.arange(tokens, device=input_ids.device)[None]
        head_dim, dropout = self.config.dim // self.config.heads, self.config.dropout
        shared = Shared(mask=self.make_mask(document_ids, head_dim=head_dim, dropout=dropout))
        if hidden is None:
            hidden = self.embedding(input_ids) + self.position_embedding(positions)
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        x = hidden
        for block in self.blocks:
            x = block(x, shared)
        if self.head is None:
            return x
        tied = self.embedding.weight if self.config.tie_embeddings else None
        return self.head(self.norm(x), labels, tied)  # type: ignore[no-any-return]

    def root_parameters(self) -> list[Tensor]:
        """What `forward` hands to other modules: a tied head is called with the embedding's weight."""
        return [self.embedding.weight] if self.config.tie_embeddings and self.embedding is not None else []

    def init_weights(self, module: nn.Module) -> None:
        """Fill one module."""
        init_lm_module(module)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks share its layers: attention by heads, feed-forward by features, the vocabulary by words."""
        feed_forward = {"blocks.*.ffn": "region", "blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"}
        return decoder_plan(feed_forward)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token."""
        lookups = [self.position_embedding]
        if not self.config.tie_embeddings:
            lookups.append(self.embedding)
        return decoder_flops_per_token(self, lookups, layers=self.config.layers, dim=self.config.dim, seq_len=seq_len)
