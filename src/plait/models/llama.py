"""Llama: the model, its named sizes, and its weights in the naming of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config import LlamaConfig
from plait.errors import ModelError
from plait.models.common.attention import Attention, Rotary, Shared, packing_mask
from plait.models.common.init import decoder_flops_per_token, decoder_plan, init_lm_module, residual_output
from plait.models.common.losses import LMHead
from plait.models.common.protocol import LossTerm
from plait.models.common.weights import Made, Put, same, stream_weights


class SwiGLU(nn.Module):
    """A gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, layers: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = residual_output(nn.Linear(hidden, dim, bias=False), layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward of each token."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """A pre-norm transformer layer: attention, then feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config.dim, config.heads, kv_heads, layers=config.layers)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = SwiGLU(config.dim, ffn_dim(config), layers=config.layers)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """Apply the layer to the residual stream (batch, tokens, dim), and return the new one."""
        x = x + self.attention(self.attention_norm(x), shared)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


def ffn_dim(config: LlamaConfig) -> int:
    """Return the width of the feed-forward: as configured, or 8/3 of `dim` rounded up to a multiple of 64."""
    return config.ffn_dim or -(-8 * config.dim // (3 * 64)) * 64


DENSE = MappingProxyType({"": "region", ".gate": "colwise", ".up": "colwise", ".down": "rowwise"})
"""The tensor-parallel styles of a dense feed-forward and its layers."""


class Llama(nn.Module):
    """A Llama decoder; implements `models.common.protocol.LanguageModel`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (LlamaBlock,)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(self.make_block(layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = LMHead(config.dim, config.vocab_size, tied=config.tie_embeddings)
        self.make_mask = packing_mask
        """Returns the mask for `Attention.attend` from document ids; who replaces one function replaces both."""
        self.apply(self.init_weights)

    def make_block(self, layer: int) -> nn.Module:
        """Return one layer."""
        return LlamaBlock(self.config)

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
        shared = self.shared(input_ids, positions, document_ids)
        x = self.embedding(input_ids) if hidden is None else hidden
        for block in self.blocks:
            x = block(x, shared)
        if self.head is None:
            return x
        tied = self.embedding.weight if self.config.tie_embeddings else None
        return self.head(self.norm(x), labels, tied)  # type: ignore[no-any-return]

    def shared(self, input_ids: Tensor, positions: Tensor | None, document_ids: Tensor | None) -> Shared:
        """Return what all blocks of one forward pass share: the rotary tables and the mask."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        head_dim = self.config.dim // self.config.heads
        return Shared(
            rotary=Rotary.at(positions, head_dim, self.config.rope_base),
            mask=self.make_mask(document_ids, head_dim=head_dim),
        )

    def root_parameters(self) -> list[Tensor]:
        """Return the weights that `forward` passes to other modules: a tied head is called with the embedding's."""
        return [self.embedding.weight] if self.config.tie_embeddings and self.embedding is not None else []

    def init_weights(self, module: nn.Module) -> None:
        """Initialize the direct parameters of one module."""
        init_lm_module(module)

    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel plan: attention by heads, feed-forward by features, the rest by vocabulary."""
        return decoder_plan({f"blocks.*.ffn{suffix}": style for suffix, style in DENSE.items()})

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token of a row of `seq_len`, without recomputation."""
        lookups = [] if self.config.tie_embeddings else [self.embedding]
        return decoder_flops_per_token(self, lookups, layers=self.config.layers, dim=self.config.dim, seq_len=seq_len)


_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "kv_heads": 8, "rope_base": 500000.0, "seq_len": 8192}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny": {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "seq_len": 64},
        "160m": {"vocab_size": 32000, "dim": 768, "layers": 12, "heads": 12, "ffn_dim": 3072, "seq_len": 2048},
        "1b": _LLAMA3 | {"dim": 2048, "layers": 16, "heads": 32, "ffn_dim": 8192, "tie_embeddings": True},
        "3b": _LLAMA3 | {"dim": 3072, "layers": 28, "heads": 24, "ffn_dim": 8192, "tie_embeddings": True},
        "8b": _LLAMA3 | {"dim": 4096, "layers": 32, "heads": 32, "ffn_dim": 14336},
        "70b": _LLAMA3 | {"dim": 8192, "layers": 80, "heads": 64, "ffn_dim": 28672},
    }
)

"""Named sizes, as keywords of `LlamaConfig`. The larger ones have the shapes of Llama 3."""

_RENAMES = (
    (r"^model\.embed_tokens\.", "embedding."),
    (r"^model\.layers\.", "blocks."),
    (r"^model\.norm\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.([qkv])_proj\.", r".attention.\1."),
    (r"\.self_attn\.o_proj\.", ".attention.out."),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn.\1."),
)
_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)

UNUSED = (r"rotary_emb\.inv_freq$",)
"""Stored tensors, in the names of `transformers`, that a `Llama` computes itself."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put) -> tuple[str, ...]:
    """Stream a `transformers` Llama folder into a `Llama` of the same sizes; see `stream_weights`."""
    tied = [] if "head.weight" in model.state_dict() else [r"^head\.weight$"]
    return stream_weights(model, path, put, translate=from_transformers, may_skip=[*UNUSED, *tied])


def from_transformers(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Yield one tensor of `LlamaForCausalLM` under Plait's name; the layout is the same."""
    yield _ours(name), tensor


def to_transformers(config: LlamaConfig) -> dict[str, Made]:
    """Return how to compute each tensor of `LlamaForCausalLM` from Plait's."""
    names = [f"model.layers.{layer}.{suffix}.weight" for layer in range(config.layers) for suffix in _LAYER]
    names = ["model.embed_tokens.weight", *names, "model.norm.weight"]
    if not config.tie_embeddings:
        names.append("lm_head.weight")
    return {name: Made((_ours(name),), same) for name in names}


def _ours(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def describe(config: LlamaConfig) -> dict[str, Any]:
    """Return the `config.json` with which `transformers` builds the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": ffn_dim(config),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.norm_eps,
        # Version 5 of transformers reads `rope_parameters`, older ones read `rope_theta`.
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,  # the defaults are those of Llama's tokenizer
        "eos_token_id": None,
    }


def from_description(hf_config: Mapping[str, Any]) -> LlamaConfig:
    """Return Plait's configuration for a `config.json`; raise a `ModelError` if no `Llama` computes the same."""
    dim, heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    rope = {**(hf_config.get("rope_scaling") or {}), **(hf_config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    supported = {
        "model_type": (hf_config.get("model_type"), "llama"),
        "hidden_act": (hf_config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(hf_config.get("attention_bias", False)), False),
        "mlp_bias": (bool(hf_config.get("mlp_bias", False)), False),
        "head_dim": (hf_config.get("head_dim") or dim // heads, dim // heads),
        "rope_type": (rope_type, "default"),
    }
    for key, (value, needed) in supported.items():
        if value != needed:
            raise ModelError(
                f"config.json has {key} {value!r}, but Plait's llama supports only {needed!r}; use `model.type: hf`"
            )
    return LlamaConfig(
        vocab_size=hf_config["vocab_size"],
        dim=dim,
        layers=hf_config["num_hidden_layers"],
        heads=heads,
        kv_heads=None if hf_config.get("num_key_value_heads") in (None, heads) else hf_config["num_key_value_heads"],
        ffn_dim=hf_config["intermediate_size"],
        seq_len=hf_config.get("max_position_embeddings", 2048),
        rope_base=float(rope.get("rope_theta") or hf_config.get("rope_theta") or 10000.0),
        norm_eps=hf_config.get("rms_norm_eps", 1e-6),
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )
