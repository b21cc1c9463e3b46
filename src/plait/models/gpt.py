"""GPT-2: the model, its named sizes, and its weights in the naming of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import GptConfig
from plait.errors import ModelError
from plait.models.common.attention import Attention, Shared, packing_mask
from plait.models.common.init import decoder_flops_per_token, decoder_plan, init_lm_module, residual_output
from plait.models.common.losses import LMHead
from plait.models.common.protocol import LossTerm
from plait.models.common.weights import Made, Put, same, stream_weights


class FeedForward(nn.Module):
    """A feed-forward with hidden width 4 * dim and GPT-2's tanh approximation of GELU."""

    def __init__(self, dim: int, *, layers: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=bias)
        self.down = residual_output(nn.Linear(4 * dim, dim, bias=bias), layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class GptBlock(nn.Module):
    """A pre-norm transformer layer: attention, then feed-forward."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.attention = Attention(
            config.dim,
            config.heads,
            config.heads,
            layers=config.layers,
            bias=config.bias,
            dropout=config.dropout,
        )
        self.ffn_norm = nn.LayerNorm(config.dim, bias=config.bias)
        self.ffn = FeedForward(config.dim, layers=config.layers, bias=config.bias)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Apply the layer to the residual stream (batch, tokens, dim), and return the new one."""
        x = x + self._drop(self.attention(self.attention_norm(x), shared))
        return x + self._drop(self.ffn(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Gpt(nn.Module):
    """A GPT-2 decoder; implements `models.common.protocol.LanguageModel`."""

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
        """Returns the mask for `Attention.attend` from document ids; who replaces one function replaces both."""
        self.apply(self.init_weights)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor | LossTerm:
        """Return the loss if labels are given, else the logits.

        A pipeline stage without the first layers takes `hidden` as input; one without the head returns hidden states.
        """
        if positions is None:
            tokens = input_ids.shape[1]
            if tokens > self.config.seq_len:
                raise ModelError(
                    f"a row of {tokens} tokens is longer than model.seq_len={self.config.seq_len}, the number of "
                    "learned positions; raise model.seq_len or shorten the rows"
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
        """Return the weights that `forward` passes to other modules: a tied head is called with the embedding's."""
        return [self.embedding.weight] if self.config.tie_embeddings and self.embedding is not None else []

    def init_weights(self, module: nn.Module) -> None:
        """Initialize the direct parameters of one module."""
        init_lm_module(module)

    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel plan: attention by heads, feed-forward by features, the rest by vocabulary."""
        feed_forward = {"blocks.*.ffn": "region", "blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"}
        return decoder_plan(feed_forward)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token of a row of `seq_len`, without recomputation."""
        lookups = [self.position_embedding]
        if not self.config.tie_embeddings:
            lookups.append(self.embedding)
        return decoder_flops_per_token(self, lookups, layers=self.config.layers, dim=self.config.dim, seq_len=seq_len)


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "seq_len": 64},
        "small": {"dim": 768, "layers": 12, "heads": 12},
        "medium": {"dim": 1024, "layers": 24, "heads": 16},
        "large": {"dim": 1280, "layers": 36, "heads": 20},
        "xl": {"dim": 1600, "layers": 48, "heads": 25},
    }
)

"""Named sizes, as keywords of `GptConfig`: a tiny one, and the four of GPT-2."""

_RENAMES = (
    (r"^transformer\.", ""),
    (r"^wte\.", "embedding."),
    (r"^wpe\.", "position_embedding."),
    (r"^h\.", "blocks."),
    (r"^ln_f\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".ffn_norm."),
    (r"\.attn\.c_proj\.", ".attention.out."),
    (r"\.mlp\.c_fc\.", ".ffn.up."),
    (r"\.mlp\.c_proj\.", ".ffn.down."),
)
_QKV = ".attn.c_attn."
_LAYER = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")

UNUSED = (r"\.attn\.(masked_)?bias$",)
"""Stored tensors, in the names of `transformers`, that a `Gpt` does not use: causal masks, in old files."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` GPT-2 folder into a `Gpt` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[*UNUSED, *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Yield Plait's tensors for one of `GPT2LMHeadModel`, which joins q, k and v and stores matrices transposed."""
    ours = _ours(name)
    tensor = _transposed(ours[0], tensor)
    for target, piece in zip(ours, tensor.chunk(len(ours)), strict=True):
        yield target, piece.contiguous()


def to_transformers(config: GptConfig) -> dict[str, Made]:
    """Return how to compute each tensor of `GPT2LMHeadModel`; its biases are zero where Plait's model has none."""
    layers = [f"transformer.h.{layer}.{suffix}" for layer in range(config.layers) for suffix in _LAYER]
    made = {name: Made((_ours(name)[0],), same) for name in ("transformer.wte.weight", "transformer.wpe.weight")}
    for name in (*layers, "transformer.ln_f"):
        weights = _ours(f"{name}.weight")
        made[f"{name}.weight"] = Made(weights, partial(_concatenated, weights[0]))
        biases = _ours(f"{name}.bias")
        made[f"{name}.bias"] = (
            Made(biases, partial(_concatenated, biases[0])) if config.bias else Made(weights, _no_bias)
        )
    if not config.tie_embeddings:
        made["lm_head.weight"] = Made(("head.weight",), same)
    return made


def _ours(name: str) -> tuple[str, ...]:
    """Return Plait's name for a tensor; for the joined q, k and v, three names."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    if _QKV in name:
        return tuple(name.replace(_QKV, f".attention.{letter}.") for letter in "qkv")
    return (name,)


def _transposed(ours: str, tensor: Tensor) -> Tensor:
    """Return a matrix transposed, if `transformers` stores it so; any other tensor unchanged."""
    return tensor.t() if tensor.ndim == 2 and re.search(r"(attention|ffn)\.", ours) else tensor


def _concatenated(ours: str, *pieces: Tensor) -> Tensor:
    return _transposed(ours, torch.cat(pieces) if len(pieces) > 1 else pieces[0]).contiguous()


def _no_bias(*weights: Tensor) -> Tensor:
    return weights[0].new_zeros(sum(weight.shape[0] for weight in weights))


def describe(config: GptConfig) -> dict[str, Any]:
    """Return the `config.json` with which `transformers` builds the same model."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.seq_len,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,  # a small vocabulary does not contain the default ids
        "eos_token_id": None,
    }


def from_description(hf_config: Mapping[str, Any]) -> GptConfig:
    """Return Plait's configuration for a `config.json`; raise a `ModelError` if no `Gpt` computes the same."""
    dim = hf_config.get("n_embd", 768)
    supported = {
        "model_type": (hf_config.get("model_type"), ("gpt2",)),
        "activation_function": (hf_config.get("activation_function", "gelu_new"), ("gelu_new", "gelu_pytorch_tanh")),
        "n_inner": (hf_config.get("n_inner") or 4 * dim, (4 * dim,)),
        "layer_norm_epsilon": (hf_config.get("layer_norm_epsilon", 1e-5), (1e-5,)),
        "scale_attn_weights": (hf_config.get("scale_attn_weights", True), (True,)),
        "scale_attn_by_inverse_layer_idx": (hf_config.get("scale_attn_by_inverse_layer_idx", False), (False,)),
    }
    for key, (value, needed) in supported.items():
        if value not in needed:
            raise ModelError(
                f"config.json has {key} {value!r}, but Plait's gpt supports only {needed[0]!r}; use `model.type: hf`"
            )
    return GptConfig(
        vocab_size=hf_config.get("vocab_size", 50257),
        dim=dim,
        layers=hf_config.get("n_layer", 12),
        heads=hf_config.get("n_head", 12),
        seq_len=hf_config.get("n_positions", 1024),
        dropout=float(hf_config.get("resid_pdrop", 0.1)),
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
    )
