"""The GPT that Megatron began with: learned positions, LayerNorm, biases everywhere; as GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.convert.megatron.described import Described, Heads, Recipes, heads_of, layers_of, refuse
from plait.checkpoint.convert.megatron.whole import Whole
from plait.errors import CheckpointError

_AS_HERE = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
}


def as_gpt2(whole: Whole) -> Described:
    """The model as GPT-2 of `transformers`, which keeps its matrices the other way round."""
    refuse(whole, _AS_HERE)
    recipes, heads = Recipes(whole), heads_of(whole)
    if heads.groups != heads.queries:
        raise CheckpointError(
            f"{whole.path} has learned positions and groups of heads, as no model of transformers has"
        )
    recipes.make("transformer.wte.weight", "embedding.word_embeddings.weight")
    recipes.make("transformer.wpe.weight", "embedding.position_embeddings.weight")
    if not whole.tied:
        recipes.make("lm_head.weight", "output_layer.weight")
    for kind in ("weight", "bias"):
        recipes.make(f"transformer.ln_f.{kind}", f"decoder.final_layernorm.{kind}")
        for layer, theirs in layers_of(whole):
            _layer(recipes, f"transformer.h.{layer}.", theirs, kind, heads)
    args = whole.args
    words, width = recipes.shape("embedding.word_embeddings.weight")
    config = {
        "model_type": "gpt2",
        "vocab_size": words,
        "n_positions": recipes.shape("embedding.position_embeddings.weight")[0],
        "n_embd": width,
        "n_layer": args.count("num_layers"),
        "n_head": heads.queries,
        "n_inner": recipes.shape("decoder.layers.0.mlp.linear_fc2.weight")[1],
        # The fused kernel, which is the default there, approximates.
        "activation_function": "gelu_new" if args("openai_gelu", False) or args("bias_gelu_fusion", True) else "gelu",
        "layer_norm_epsilon": float(args("norm_epsilon", 1e-5)),
        "tie_word_embeddings": whole.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return Described(config, recipes.all)


def _layer(recipes: Recipes, ours: str, theirs: str, kind: str, heads: Heads) -> None:
    turn = torch.t if kind == "weight" else None

    def sorted_heads(joined: Tensor) -> Tensor:
        whole = torch.cat([heads.part(which)(joined) for which in range(3)])
        return whole if turn is None else turn(whole)

    norms = {
        "ln_1": (f"self_attention.linear_qkv.layer_norm_{kind}", f"input_layernorm.{kind}"),
        "ln_2": (f"mlp.linear_fc1.layer_norm_{kind}", f"pre_mlp_layernorm.{kind}"),
    }
    for target, names in norms.items():
        recipes.make(f"{ours}{target}.{kind}", *(theirs + name for name in names))
    recipes.make(f"{ours}attn.c_attn.{kind}", f"{theirs}self_attention.linear_qkv.{kind}", by=sorted_heads)
    recipes.make(f"{ours}attn.c_proj.{kind}", f"{theirs}self_attention.linear_proj.{kind}", by=turn)
    recipes.make(f"{ours}mlp.c_fc.{kind}", f"{theirs}mlp.linear_fc1.{kind}", by=turn)
    recipes.make(f"{ours}mlp.c_proj.{kind}", f"{theirs}mlp.linear_fc2.{kind}", by=turn)
