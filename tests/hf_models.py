"""Tiny models of every architecture of `transformers`, made from the defaults of its own configuration classes.

    for model_type in model_types("causal-lm"):
        model = tiny_model(model_type, "causal-lm", seed=0)
        model(**batch(model, "causal-lm", seed=1)).loss.backward()

No architecture is listed by name, except where one insists on a value that its configuration does not tell (`INSISTS`).
The default configuration is walked: sizes become small by what they are called, lists with an entry per layer are cut
to a few layers that still have each kind of layer, special tokens come within the vocabulary, dropout is zero.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS, ROWS, TOKENS = 96, 64, 48, 4, 2, 16, 2, 2, 16
IMAGE, PATCH, MEL, EXPERTS = 32, 8, 16, 4

KINDS: Mapping[str, str] = {
    "causal-lm": "CAUSAL_LM",
    "masked-lm": "MASKED_LM",
    "seq2seq-lm": "SEQ_TO_SEQ_CAUSAL_LM",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "image-classification": "IMAGE_CLASSIFICATION",
    "speech-seq2seq": "SPEECH_SEQ_2_SEQ",
    "contrastive": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "sequence-classification": "SEQUENCE_CLASSIFICATION",
}
"""The family of a model, and the mapping of `transformers` that lists its classes."""

SIZES: tuple[tuple[str, int | float], ...] = (
    (r"(chunk_size_feed_forward|chunk_size_lm_head|pretraining_tp|num_labels|(?:task_)?type_vocab_size)", -1),
    (r".*(drop|dropout|pdrop|dropout_rate|dropout_prob|drop_rate|layerdrop|dropout_p|dropout_ratio|.*jitter.*)", 0.0),
    (r"(vocab_size_per_layer_input)", VOCAB),
    (r"(src_|tgt_|decoder_|unpadded_|text_)?vocab_size", VOCAB),
    (r".*vocab_size", VOCAB),
    (r"(max_position_embeddings|max_sequence_length|n_positions|n_ctx|seq_length|max_seq_len|n_position|max_seqlen|"
     r"max_source_positions|max_target_positions|max_length|context_length|original_max_position_embeddings)", 128),
    (r"(num_hidden_layers|n_layers?|num_layers|num_decoder_layers|num_encoder_layers|encoder_layers|decoder_layers|depth|"
     r"num_blocks|.*_(?:encoder|decoder)_layers)", LAYERS),
    (r"(num_key_value_heads|num_kv_heads|multi_query_group_num|swa_num_key_value_heads|n_kv_heads|"
     r".*num_key_value_heads)", KV_HEADS),
    (r"(.*num_attention_heads|n_heads?|num_heads|.*attention_heads|linear_num_value_heads|resampler_heads|"
     r"resampler_n_heads|num_self_attention_heads|encoder_attention_heads)", HEADS),
    (r"(index_n_heads)", 2),
    (r"(linear_num_key_heads|mamba_n_groups|n_groups|num_groups)", 2),
    (r"(qk_rope_head_dim|qk_rope_dim)", 8),
    (r"(qk_nope_head_dim)", 16),
    (r"(qk_head_dim)", 24),
    (r"(attention_head_dim|head_dim|.*_head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels|"
     r"resampler_dim_head)", HEAD_DIM),
    (r"(rotary_dim)", 8),
    (r"(.*lora_rank|.*lora_dim|.*_rank|low_rank_dim|hc_lowrank)", 12),
    (r"(moe_intermediate_size|expert_ffn_hidden_size|shared_expert_intermediate_size|moe_shared_expert_.*size|"
     r"share_expert_dim|shared_experts_intermediate_size|moe_ffn_hidden_size|moe_.*intermediate_size)", 32),
    (r"(.*intermediate_size.*|d_ff|dff|.*ffn_dim|n_inner|ffn_hidden_size|feed_forward_size|d_inner|hidden_dim|dim_ff|"
     r"mlp_dim|.*ffn_hidden_size|pooler_hidden_size)", INTERMEDIATE),
    (r"(num_experts_per_tok(?:en)?|moe_k|top_k_experts|moe_topk|num_experts_per_topk|router_topk|moe_top_k|experts_per_token|"
     r"moe_num_experts_per_tok)", 2),
    (r"(num_(?:local_|routed_)?experts|n_routed_experts|moe_num_experts|zero_expert_num)", EXPERTS),
    (r"(n_group|num_expert_group)", 2),
    (r"(topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace|num_dense_layers|moe_num_shared_experts|"
     r"num_sparse_(?:encoder|decoder)_layers|num_memory_blocks|num_mem_blocks)", 1),
    (r"(num_nextn_predict_layers|num_kv_shared_layers|num_mtp_.*)", 0),
    (r"(interleave_moe_layer_step|moe_layer_frequency|decoder_sparse_step|encoder_sparse_step|"
     r"expert_layer_period|attn_layer_period|full_attention_interval|global_attn_every_n_layers|sliding_window_pattern|_sliding_window_pattern|"
     r"moe_layer_interval)", 2),
    (r"(attn_layer_offset|expert_layer_offset)", 1),
    (r"(.*d_state|ssm_state_size|state_size)", 8),
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads)", 4),
    (r"(mamba_d_head|mamba_head_dim|mamba_headdim)", 32),
    (r"(mamba_dt_rank|time_step_rank)", 4),
    (r"(mamba_d_ssm)", 128),
    (r"(sliding_window|sliding_window_size|attention_window_size|attention_chunk_size|window|local_attention)", 8),
    (r"(index_topk|index_topk_blocks)", 4),
    (r"(chunk_size|mamba_chunk_size|block_size|index_block_size|global_block_size)", 8),
    (r"(image_size|.*_image_size|resolution)", IMAGE),
    (r"(patch_size)", PATCH),
    (r"(spatial_patch_size)", PATCH),
    (r"(num_position_embeddings)", 16),
    (r"(num_mel_bins)", MEL),
    (r"(hidden_size_per_layer_input|laurel_rank|router_hidden_size)", 16),
    (r"(.*hidden_size|n_embd|d_model|embed_dim|embedding_dim|hidden_dim|dim|emb_dim|embedding_size|word_embed_proj_dim|"
     r"input_embedding_size|output_embedding_size|encoder_hidden_size|projection_dim|vision_output_dim|"
     r"projector_.*_dim|out_hidden_size|lru_width|attention_hidden_size|text_embed_dim|projection_size)", HIDDEN),
)  # fmt: skip
"""What a size is called, and what it becomes; the first that matches. -1: as it is."""

INSISTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "dots1": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "kolibri1": {"num_experts": EXPERTS},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
        },
    },
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 3},
    "xlstm": {"mode": "train", "chunk_size": TOKENS},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "dots3_note": {"adapter_in_dim": HIDDEN},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": KV_HEADS},
    "mamba2": {"head_dim": 32},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}
    },
    "chameleon": {"vocabulary_map": {"<image>": 9}},
    "emu3": {"vocabulary_map": {"<image>": 9}},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]]},
    "glm5_next_text": {"index_topk": 16},
    "esmc": {"num_key_value_heads": HEADS},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
}
"""What an architecture insists on, beyond what its configuration class says."""


def model_types(kind: str) -> list[str]:
    """Return the model types of a family, as `transformers` lists them."""
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES"))


def tiny_config(model_type: str) -> Any:
    """Return a configuration of an architecture with few and small layers, one of each kind that it has by default."""
    from transformers import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = CONFIG_MAPPING[model_type]
        return _tiny(cls, INSISTS.get(model_type, {}))


def _tiny(cls: Any, insists: Mapping[str, Any]) -> Any:
    default = cls() if not insists.get("_required") else cls(**insists["_required"])
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    layers, kept = _layers(values)
    declared = {field.name for field in fields(cls)} - {"id2label", "label2id", "architectures"}
    declared |= {stored for name, stored in cls.attribute_map.items() if name in declared}
    derived = {field.name for field in fields(cls) if field.default is None}
    changes: dict[str, Any] = {}
    special = iter(range(VOCAB - 1, 8, -1))
    for name, value in values.items():
        # What a configuration computes from its other values comes out small by itself.
        computed = name in derived and isinstance(value, int | float) and not re.search("experts|d_rel", name)
        if name not in declared or computed:
            continue
        new = _small(name, value, layers, kept, special, cls)
        if new is not value:
            changes[name] = new
    if values.get("kv_lora_rank"):  # latent attention has no groups, and rotates all of a part of its own
        if "num_key_value_heads" in values:
            changes["num_key_value_heads"] = HEADS
        if values.get("head_dim") == values.get("qk_rope_head_dim"):
            changes["head_dim"] = 8
        if rope := changes.get("rope_parameters"):
            rope.pop("partial_rotary_factor", None)
    if "head_dim" in values and values["head_dim"] is None:
        changes["head_dim"] = HEAD_DIM
    changes.update({key: value for key, value in insists.items() if key != "_required"})
    return cls(**{**insists.get("_required", {}), **changes})


def _layers(values: Mapping[str, Any]) -> tuple[int | None, list[int]]:
    """Return the number of layers by default, and the indices of those that stay: one of each kind, at least two."""
    depth = next((values[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), None)
    lists = [value for value in values.values() if isinstance(value, list | tuple) and len(value) == depth]
    if depth is None or not lists:
        return depth, list(range(LAYERS))
    kinds: dict[str, int] = {}
    for index in range(depth):
        kinds.setdefault(str([entry[index] for entry in lists if isinstance(entry[index], str)]), index)
    kept = sorted(kinds.values())
    for index in range(depth):
        if len(kept) >= LAYERS:
            break
        kept = sorted({*kept, index})
    return depth, kept


def _small(name: str, value: Any, depth: int | None, kept: list[int], special: Iterable[int], cls: Any) -> Any:
    if hasattr(value, "to_dict"):
        config = _tiny(type(value), INSISTS.get(value.model_type, {}))
        rope = getattr(config, "rope_parameters", None)
        if name == "text_config" and rope and "rope_theta" in rope:  # positions of images, where a model has them
            half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
            rope.setdefault("mrope_section", [3, 3, 2] if half == 8 else [2, 1, 1])
        return config
    if isinstance(value, bool) or value is None:
        return value
    if re.fullmatch(r"pad_token_id|bos_token_id|eos_token_id|decoder_start_token_id|sep_token_id|cls_token_id", name):
        return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}.get(name, 1)
    if re.fullmatch(r".*_token_(id|index)", name) and isinstance(value, int):
        return next(iter(special))
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value)
    if isinstance(value, list | tuple):
        return _list(name, value, depth, kept)
    if isinstance(value, int | float):
        if name in ("num_hidden_layers", "n_layer", "num_layers"):
            return len(kept)
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name):
                return value if size == -1 else type(value)(min(size, value) if size else size)
    return value


def _list(name: str, value: Any, depth: int | None, kept: list[int]) -> Any:
    if depth and len(value) == depth:
        if all(isinstance(entry, int) and entry > INTERMEDIATE for entry in value):
            return [INTERMEDIATE] * len(kept)
        return type(value)(value[index] for index in kept)
    if value and all(isinstance(entry, int) for entry in value) and re.search(r"layer|idx|index", name):
        return type(value)(index for index, old in enumerate(kept) if old in value) or type(value)([len(kept) - 1])
    return value


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return valid rotary parameters for `HEAD_DIM`."""
    new: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            new[key] = _rope(entry)
        elif key == "mrope_section":
            new[key] = [2, 1, 1] if "partial_rotary_factor" in value else [3, 3, 2]
        elif key == "partial_rotary_factor":
            new[key] = max(entry, 0.5)
        elif key == "original_max_position_embeddings":
            new[key] = 64
        elif key in ("short_factor", "long_factor"):
            new[key] = [1.0] * (HEAD_DIM // 2)
        else:
            new[key] = entry
    return new


def tiny_model(model_type: str, kind: str, seed: int = 0) -> Any:
    """Return a tiny model with random weights, of the class that `transformers` has for the family."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind]}_MAPPING_NAMES")[model_type]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config = tiny_config(model_type)
    if not isinstance(config, cls.config_class):  # the language model of a model with other towers
        config = next((sub for sub in vars(config).values() if isinstance(sub, cls.config_class)), config)
    if config.is_encoder_decoder and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if kind == "causal-lm" and not config.is_encoder_decoder and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(config)


def batch(model: Any, kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Return random inputs of the family, with labels."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config

    def tokens(count: int = TOKENS) -> Tensor:
        return torch.randint(3, 60, (ROWS, count), generator=generator)

    def image() -> Tensor:
        return torch.randn(ROWS, 3, IMAGE, IMAGE, generator=generator)

    if model.config.model_type in ("git", "blip", "blip-2", "instructblip"):
        return {"input_ids": (ids := tokens()), "labels": ids, "pixel_values": image()}
    if kind in ("causal-lm", "masked-lm"):
        ids = tokens()
        labels = ids if kind == "causal-lm" else ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)
        return {"input_ids": ids, "labels": labels}
    if kind == "seq2seq-lm":
        if not config.is_encoder_decoder:  # sound in, text out, by one decoder: its text alone
            return batch(model, "causal-lm", seed)
        return {"input_ids": tokens(), "labels": tokens()}
    if kind == "sequence-classification":
        return {"input_ids": tokens(), "labels": torch.randint(0, 2, (ROWS,), generator=generator)}
    if kind == "image-classification":
        return {"pixel_values": image(), "labels": torch.randint(0, 2, (ROWS,), generator=generator)}
    if kind == "contrastive":
        return {"input_ids": tokens(), "pixel_values": image(), "return_loss": torch.tensor(True)}
    ids = tokens()
    return {"input_ids": ids, "labels": ids}
