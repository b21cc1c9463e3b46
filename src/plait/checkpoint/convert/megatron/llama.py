"""Llama and its kin: rotated positions, RMSNorm, gated layers; as Llama, Qwen2, Qwen3, Mixtral or Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.checkpoint.convert.megatron.described import Described, Heads, Recipes, heads_of, layers_of, refuse
from plait.checkpoint.convert.megatron.whole import Whole

_AS_HERE = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_latent_attention": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
}
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's `--use-rope-scaling` is, besides its factor."""


def as_llama(whole: Whole) -> Described:
    """The model as one of `transformers`, whichever of the family its tensors make it."""
    refuse(whole, _AS_HERE)
    recipes, heads = Recipes(whole), heads_of(whole)
    recipes.make("model.embed_tokens.weight", "embedding.word_embeddings.weight")
    recipes.make("model.norm.weight", "decoder.final_layernorm.weight")
    if not whole.tied:
        recipes.make("lm_head.weight", "output_layer.weight")
    experts, kind = _experts(recipes), _kind(recipes)
    for layer, theirs in layers_of(whole):
        ours = f"model.layers.{layer}."
        _attention(recipes, ours, theirs, heads)
        if kind == "mixtral":
            _mixture(recipes, f"{ours}block_sparse_moe.", theirs, ("w1", "w3", "w2"), experts)
        elif kind == "qwen3_moe":
            _mixture(recipes, f"{ours}mlp.", theirs, ("gate_proj", "up_proj", "down_proj"), experts)
        else:
            _gated(recipes, f"{ours}mlp.", f"{theirs}mlp.", ("gate_proj", "up_proj", "down_proj"))
    return Described(_config(whole, recipes, heads, kind, experts), recipes.all)


def _kind(recipes: Recipes) -> str:
    """The `model_type`."""
    normed = recipes.has("decoder.layers.0.self_attention.q_layernorm.weight")
    if recipes.has("decoder.layers.0.mlp.router.weight"):
        return "qwen3_moe" if normed else "mixtral"
    if normed:
        return "qwen3"
    return "qwen2" if recipes.has("decoder.layers.0.self_attention.linear_qkv.bias") else "llama"


def _experts(recipes: Recipes) -> int:
    router = "decoder.layers.0.mlp.router.weight"
    return recipes.shape(router)[0] if recipes.has(router) else 0


def _attention(recipes: Recipes, ours: str, theirs: str, heads: Heads) -> None:
    # Transformer Engine computes a norm and the product behind it as one, and keeps the norm's weight there.
    inside = f"{theirs}self_attention."
    recipes.make(
        f"{ours}input_layernorm.weight", f"{inside}linear_qkv.layer_norm_weight", f"{theirs}input_layernorm.weight"
    )
    for which, part in enumerate("qkv"):
        for kind in ("weight", "bias"):
            if kind == "weight" or recipes.has(f"{inside}linear_qkv.bias"):
                target = f"{ours}self_attn.{part}_proj.{kind}"
                recipes.make(target, f"{inside}linear_qkv.{kind}", by=heads.part(which))
    recipes.make(f"{ours}self_attn.o_proj.weight", f"{inside}linear_proj.weight")
    for part in "qk":
        if recipes.has(f"{inside}{part}_layernorm.weight"):
            recipes.make(f"{ours}self_attn.{part}_norm.weight", f"{inside}{part}_layernorm.weight")
    recipes.make(
        f"{ours}post_attention_layernorm.weight",
        f"{theirs}mlp.linear_fc1.layer_norm_weight",
        f"{theirs}pre_mlp_layernorm.weight",
    )


def _gated(recipes: Recipes, ours: str, theirs: str, names: tuple[str, str, str]) -> None:
    gate, up, down = names
    recipes.make(f"{ours}{gate}.weight", f"{theirs}linear_fc1.weight", by=_first_half)
    recipes.make(f"{ours}{up}.weight", f"{theirs}linear_fc1.weight", by=_second_half)
    recipes.make(f"{ours}{down}.weight", f"{theirs}linear_fc2.weight")


def _mixture(recipes: Recipes, ours: str, theirs: str, names: tuple[str, str, str], experts: int) -> None:
    recipes.make(f"{ours}gate.weight", f"{theirs}mlp.router.weight")
    for expert in range(experts):
        _gated(recipes, f"{ours}experts.{expert}.", f"{theirs}mlp.experts.local_experts.{expert}.", names)


def _first_half(joined: Tensor) -> Tensor:
    return joined.chunk(2)[0]


def _second_half(joined: Tensor) -> Tensor:
    return joined.chunk(2)[1]


def _config(whole: Whole, recipes: Recipes, heads: Heads, kind: str, experts: int) -> dict[str, Any]:
    args = whole.args
    words, width = recipes.shape("embedding.word_embeddings.weight")
    inner = "decoder.layers.0.mlp.experts.local_experts.0." if experts else "decoder.layers.0.mlp."
    hidden = recipes.shape(f"{inner}linear_fc2.weight")[1]
    found: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": args.count("num_layers"),
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.groups,
        "max_position_embeddings": args.count("max_position_embeddings"),
        "rms_norm_eps": float(args("norm_epsilon", 1e-5)),
        "rope_parameters": _rope(whole),
        "tie_word_embeddings": whole.tied,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind.startswith("qwen3") or heads.size != width // heads.queries:
        found["head_dim"] = heads.size
    if experts:
        count = "num_local_experts" if kind == "mixtral" else "num_experts"
        found |= {count: experts, "num_experts_per_tok": args.count("moe_router_topk")}
    if kind == "qwen3_moe":
        found |= {
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return found


def _rope(whole: Whole) -> dict[str, Any]:
    base = {"rope_theta": float(whole.args("rotary_base", 10000))}
    if not whole.args("use_rope_scaling", False):
        return {"rope_type": "default", **base}
    return {"rope_type": "llama3", **base, "factor": float(whole.args("rope_scaling_factor", 8.0)), **_LLAMA_3}
