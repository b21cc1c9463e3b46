"""Real Megatron Core on the CPU: models of several families, saved as Megatron-LM saves them.

Megatron takes a CUDA device, or Transformer Engine, for granted in a few places, none of which matters to what it
computes.
"""

from __future__ import annotations

import argparse
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

VOCABULARY, LENGTH, LAYERS, WIDTH, HEADS, GROUPS, INNER, EXPERTS = 48, 12, 4, 32, 4, 2, 40, 4
BASE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "kv_channels": WIDTH // HEADS,
    "ffn_hidden_size": INNER,
    "max_position_embeddings": LENGTH,
    "padded_vocab_size": VOCABULARY,
    "norm_epsilon": 1e-5,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "bias_gelu_fusion": False,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "untie_embeddings_and_output_weights": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"untie_embeddings_and_output_weights": False, "kv_channels": 12},
    "scaled": {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "rotary_base": 500.0},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "mixtral": {"num_experts": EXPERTS, "moe_router_topk": 2},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_router_topk": 2, "qk_layernorm": True},
    "gpt2": {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "group_query_attention": False,
        "num_query_groups": 1,
        "untie_embeddings_and_output_weights": False,
    },
}


def arguments(family: str, tensor: int, pipeline: int, experts: int, virtual: int) -> argparse.Namespace:
    """What Megatron-LM would keep of its command line."""
    return argparse.Namespace(
        **{
            **BASE,
            **FAMILIES[family],
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "expert_model_parallel_size": experts,
            "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
            "params_dtype": torch.float32,
        }
    )


def without_cuda() -> None:
    """Let Megatron do without a CUDA device."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_, **__: nullcontext()
    torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[assignment]
    moe_utils.te_general_gemm = None  # asked for, and not there without Transformer Engine


def build(args: argparse.Namespace, stage: int | None = None) -> Any:
    """The model of this rank, or one of its virtual stages."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    mixture = getattr(args, "num_experts", None)
    biased = args.normalization == "LayerNorm"
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        num_moe_experts=mixture,
        moe_router_topk=getattr(args, "moe_router_topk", 2),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=biased,
        add_qkv_bias=getattr(args, "add_qkv_bias", False) or biased,
        qk_layernorm=getattr(args, "qk_layernorm", False),
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=mixture, qk_layernorm=config.qk_layernorm, normalization=args.normalization
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=False,
        vp_stage=stage,
    )
    return shaken(model)


def shaken(model: Any) -> Any:
    """No weight is zero or one: what is left out, or exchanged for another, shows. What ranks share stays the same."""
    from megatron.core import parallel_state

    tensor, expert = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            cut = getattr(param, "tensor_model_parallel", False)
            own = f"{name} {tensor if cut else 0} {expert if '.experts.' in name else 0}"
            generator = torch.Generator().manual_seed(zlib.crc32(own.encode()))
            param.add_(0.1 * torch.randn(param.shape, generator=generator))
    return model


def answer(model: Any, tokens: Tensor) -> Tensor:
    """Its logits."""
    rows, length = tokens.shape
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    with torch.no_grad():
        found: Tensor = model.eval()(tokens, torch.arange(length).expand(rows, length), hidden)
    return found


def save(
    rank: int, size: int, root: Path, family: str, tensor: int, pipeline: int, experts: int, virtual: int
) -> Tensor | None:
    """Make a model on these ranks and save it in both formats, in the folders `torch` and `torch_dist`.

    Returns the logits for `tokens()` where one rank has all of the model.
    """
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state

    without_cuda()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=tensor,
    )
    torch.manual_seed(3)
    args = arguments(family, tensor, pipeline, experts, virtual)
    models = [build(args, stage) for stage in range(virtual)] if virtual > 1 else [build(args)]
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
    named = {"model": models[0]} if virtual == 1 else {f"model{index}": model for index, model in enumerate(models)}
    for form in ("torch", "torch_dist"):
        folder = root / form / "iter_0000007"
        if rank == 0:
            folder.mkdir(parents=True)
            (root / form / "latest_checkpointed_iteration.txt").write_text("7")
        dist.barrier()
        if form == "torch_dist":
            sharded = {name: model.sharded_state_dict() for name, model in named.items()}
            dist_checkpointing.save({**common, **sharded}, str(folder))
        else:
            place = folder / rank_folder(pipeline, experts)
            place.mkdir(exist_ok=True)
            held = {name: model.state_dict() for name, model in named.items()}
            torch.save({**common, **held}, place / "model_optim_rng.pt")
    dist.barrier()
    return answer(models[0], tokens()) if pipeline == 1 and experts == 1 else None


def rank_folder(pipeline: int, experts: int) -> str:
    """As Megatron-LM names the folder of a rank."""
    from megatron.core import parallel_state

    numbers = [parallel_state.get_pipeline_model_parallel_rank()] if pipeline > 1 else []
    numbers += [parallel_state.get_expert_model_parallel_rank()] if experts > 1 else []
    first = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    return "_".join([first, *(f"{number:03d}" for number in numbers)])


def tokens() -> Tensor:
    """The same everywhere."""
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(11))
