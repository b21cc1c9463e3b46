"""The whole of a mixture-of-experts Llama."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config import MoeConfig
from plait.models.common.flops import decoder_flops_per_token
from plait.models.common.init import init_lm_module
from plait.models.common.plan import decoder_plan
from plait.models.common.protocol import IGNORE_INDEX
from plait.models.llama.model import DENSE, Llama
from plait.models.moe.block import MoeBlock, Stream, is_mixture
from plait.models.moe.experts import Experts
from plait.models.moe.router import Router, balance
from plait.spec import LossTerm


class Moe(Llama):
    """A Llama with mixtures of experts; keeps the protocol of `models.common.protocol.LanguageModel`.

    In training the loss has the routers' penalties in it, each row's as often as the row has targets; see
    [Note: balance does not depend on how a batch was cut]. In evaluation it is the cross-entropy alone.
    """

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (MoeBlock,)

    config: MoeConfig

    def __init__(self, config: MoeConfig) -> None:
        super().__init__(config)

    def make_block(self, layer: int) -> nn.Module:
        """One layer, with a mixture or without."""
        return MoeBlock(self.config, layer)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | tuple[Tensor, Tensor] | None = None,
        real: Tensor | None = None,
    ) -> Tensor | Stream | LossTerm:
        """Loss where labels are given, logits where not. Routers are not charged for tokens that are not `real`.

        A model without its first layers starts from `hidden`; one without its head answers with its `Stream`.
        """
        shared = self.shared(input_ids, positions, document_ids)
        shared.real = real
        x, penalty = Stream.of(self.embedding(input_ids) if hidden is None else hidden)
        for block in self.blocks:
            x, penalty = block(x, shared, penalty)
        if self.head is None:
            return Stream(x, penalty)
        tied = self.embedding.weight if self.config.tie_embeddings else None
        answer: Tensor | LossTerm = self.head(self.norm(x), labels, tied)
        if labels is None or not isinstance(answer, LossTerm):
            return answer
        targets = (labels != IGNORE_INDEX).sum(1)
        return LossTerm(answer.sum + (penalty * targets).sum(), answer.count)

    def init_weights(self, module: nn.Module) -> None:
        """Fill one module."""
        if isinstance(module, Experts):
            module.reset_parameters()
        else:
            init_lm_module(module)
        for buffer in module.buffers(recurse=False):  # of a router
            nn.init.zeros_(buffer)

    def tensor_plan(self) -> dict[str, str]:
        """How ranks share its layers: those of a Llama as there, and so what all tokens of a mixture see.

        Its other experts are shared by expert parallelism, over these ranks too.
        """
        feed_forward: dict[str, str] = {}
        for layer in range(self.config.layers):
            words = self._mixture_plan() if is_mixture(self.config, layer) else DENSE
            feed_forward |= {f"blocks.{layer}.ffn{part}": word for part, word in words.items()}
        return decoder_plan(feed_forward)

    def _mixture_plan(self) -> dict[str, str]:
        shared = {f".shared{part}": word for part, word in DENSE.items()} if self.config.shared_experts else {}
        return {"": "whole_sequence", **shared}

    @torch.no_grad()
    def after_step(self, group: dist.ProcessGroup | None, *, updated: bool | Tensor = True) -> None:
        """Move the routers' biases against the load of the step just done, if it `updated` the weights.

        A tensor is an answer on the device, which is not waited for. To be called on every rank after every step, with
        the group of all ranks that see other tokens for the same parameters; None where there is one rank. Afterwards
        the biases are the same on all of them.
        """
        routers = [module for module in self.modules() if isinstance(module, Router) and module.load is not None]
        if not routers:
            return
        loads = torch.stack([router.load for router in routers if router.load is not None])
        for router in routers:
            assert router.load is not None
            router.load.zero_()
        if isinstance(updated, Tensor):
            loads *= updated  # no load moves nothing
        elif not updated:
            return
        if group is not None:
            dist.all_reduce(loads, group=group)
        balance(routers, loads)

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of forward and backward for one token, which goes through `top_k` experts of a mixture."""
        config = self.config
        lookups = [] if config.tie_embeddings else [self.embedding]
        total = decoder_flops_per_token(self, lookups, layers=config.layers, dim=config.dim, seq_len=seq_len)
        routed = sum(p.numel() for m in self.modules() if isinstance(m, Experts) for p in m.parameters())
        return total - 6.0 * routed * (config.experts - config.top_k) / config.experts
