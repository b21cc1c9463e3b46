"""The whole of Llama."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from plait.config import LlamaConfig
from plait.models.common.attention import Shared
from plait.models.common.documents import packing_mask
from plait.models.common.flops import decoder_flops_per_token
from plait.models.common.head import LMHead
from plait.models.common.init import init_lm_module
from plait.models.common.plan import decoder_plan
from plait.models.common.rope import Rotary
from plait.models.llama.block import LlamaBlock
from plait.spec import LossTerm

DENSE = MappingProxyType({"": "region", ".gate": "colwise", ".up": "colwise", ".down": "rowwise"})
"""How ranks share a dense feed-forward: itself, and its layers."""


class Llama(nn.Module):
    """A Llama decoder; keeps the protocol of `models.common.protocol.LanguageModel`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (LlamaBlock,)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = LMHead(config.dim, config.vocab_size, tied=config.tie_embeddings)
        self.make_mask = packing_mask
        """From document ids to what attention is given as a mask; goes with `Attention.attend`."""
        self.apply(self.init_weights)

    def make_block(self, layer: int) -> nn.Module:
        """One layer; all are alike."""
        return LlamaBlock(self.config)

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
        shared = self.shared(input_ids, positions, document_ids)
        x = self.embedding(input_ids) if hidden is None else hidden
        for block in self.blocks:
            x = block(x, shared)
        if self.head is None:
            return x
        tied = self.embedding.weight if self.config.tie_embeddings else None
        return self.head(self.norm(x), labels, tied)  # type: ignore[no-any-return]

    def shared(self, input_ids: Tensor, positions: Tensor | None, document_ids: Tensor | None) -> Shared:
        """What all blocks of one forward need: the rotary table and the mask."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        head_dim = self.config.dim // self.config.heads
        return Shared(
            rotary=Rotary.at(positions, head_dim, self.config.rope_base),
            mask=self.make_mask(document_ids, head_dim=head_dim),
        )

    def root_parameters(self) -> list[Tensor]:
        """What `forward` hands to other modules: a tied head is called with the embedding's weight."""
        return [self.embedding.weight] if self.config.tie_embeddings and self.embedding is not None else []

    def init_weights(self, module: nn.Module) -> None:
        """Fill one module."""
        init_lm_module(module)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks share its layers: attention by heads, feed-forward by features, the vocabulary by words."""
        return decoder_plan({f"blocks.*.ffn{part}": word for part, word in DENSE.items()})

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token."""
        lookups = [] if self.config.tie_embeddings else [self.embedding]
        return decoder_flops_per_token(self, lookups, layers=self.config.layers, dim=self.config.dim, seq_len=seq_len)
