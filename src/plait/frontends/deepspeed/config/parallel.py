"""Sections that spread one model, or one sample, over several ranks."""

from __future__ import annotations

from typing import Any

from plait.frontends.deepspeed.config.keys import group, off, only, refused, switched, unneeded
from plait.frontends.deepspeed.config.kinds import (
    ANY,
    COUNT,
    FLAG,
    FORMAT,
    NUMBER,
    SECTION,
    SIZE,
    TEXT,
    WHOLE,
    either,
    one_of,
)
from plait.frontends.deepspeed.config.work import Key, Table, Work

_TENSOR = ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size", "tensor_parallel.tensor_parallel.tp_size")


def ranks_of_one_sample(work: Work) -> int:
    """How many ranks work on the same sample: those are no data-parallel ranks."""
    count = 1
    for path in (*_TENSOR, "sequence_parallel_size"):
        value = work.look(path)
        count *= int(value) if COUNT.has(value) else 1
    return count


def _axis(axis: str, *, needs: str = "") -> Key:
    """The size of a mesh axis; 0 and 1 leave it alone."""

    def act(work: Work, key: str, value: Any) -> None:
        if value <= 1:
            work.leave(key, value, "one rank alone: nothing is cut")
            return
        path = f"strategy.layout.{axis}"
        if path in work.sources:
            work.wrong(key, f"{int(value)} says again what `{work.sources[path]}` says", "Leave one of the two out.")
            return
        work.put(path, int(value), key)
        work.map(key, value, f"{path}: {int(value)}" + (f"; {needs}" if needs else ""))

    return Key(SIZE, act)


def _sequence(work: Work, key: str, value: Any) -> None:
    if value == 1:
        work.leave(key, value, "one rank alone: sequences are whole")
        return
    work.put("strategy.layout.cp", int(value), key)
    work.put("strategy.context.kind", "ulysses", key)
    work.map(key, value, f"strategy.layout.cp: {int(value)}, strategy.context.kind: ulysses")


_SAME = "the result is the same, only who computes it when differs"
_OWN_PLAN = "the model's own plan says how each layer is cut"

_TP: Table = {
    "tp_size": _axis("tp"),
    "tp_grain_size": unneeded(SIZE, "layers are cut evenly"),
    "mpu": refused(ANY, "groups of ranks are made from `strategy.layout`: leave it out"),
    "tp_group": refused(ANY, "groups of ranks are made from `strategy.layout`: leave it out"),
}

_TENSOR_PARALLEL: Table = {
    "autotp_size": _axis("tp"),
    "tp": group(_TP),
    "tensor_parallel": group(_TP),
    "dtype": unneeded(FORMAT, "the format is that of `fp16` or `bf16`"),
    "tp_overlap_comm": unneeded(FLAG, f"{_SAME}; on CUDA `strategy.tensor.async_tp` with `strategy.compile` overlaps"),
    "vocab_parallel_lm_head": unneeded(FLAG, f"{_OWN_PLAN}, the last one too; {_SAME}"),
    "vocab_parallel_ce_backend": unneeded(one_of("torch", "liger"), "the loss is the same with either"),
    "injection_policy_tuple": refused(
        ANY, "write `strategy.tensor.plan`: patterns of module names and how each is cut"
    ),
    "partition_config": refused(
        SECTION,
        "write `strategy.tensor.plan` instead, for example {layers.*.mlp.up: colwise, layers.*.mlp.down: rowwise}",
    ),
    "preset_model": unneeded(TEXT, _OWN_PLAN),
    "keep_module_on_host": unneeded(FLAG, "no rank ever holds the whole model: it is built on the meta device"),
    "replace_with_kernel_inject": off("kernels of inference are not for training: leave it out"),
    "kernel_inject": off("kernels of inference are not for training: leave it out"),
}

_ROUTING = "routing is the model's own: leave it out, and set it in the `model` section"
_FOUND = "experts are found through the model's own plan"

_EXPERT_PARALLEL: Table = {
    "enabled": unneeded(FLAG, "`autoep_size` says so"),
    "autoep_size": _axis("ep", needs="the model is Plait's own `moe`"),
    "expert_tensor_parallel_size": only(1, COUNT, "experts are whole", "experts are not cut over `tp`: write 1"),
    "validate_folding_routing": unneeded(FLAG, "a check of DeepSpeed's own"),
    "async_split_plan": unneeded(FLAG, _SAME),
    "use_grouped_mm": unneeded(FLAG, _SAME),
    "disable_triton_grouped_mm": unneeded(FLAG, _SAME),
    "comm_backend": unneeded(one_of("comm", "deepep"), _SAME),
    **dict.fromkeys(("comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"), unneeded(WHOLE, _SAME)),
    **{
        name: Key(TEXT, lambda w, k, v: w.leave(k, v, _SAME), knows_auto=True)
        for name in ("combine_impl", "row_weighting_impl", "gate_up_impl", "score_apply")
    },
    **dict.fromkeys(
        (
            "preset_model",
            "moe_layer_pattern",
            "expert_pattern",
            "router_pattern",
            "expert_w1",
            "expert_w2",
            "expert_w3",
            "num_experts_attr",
            "top_k_attr",
            "shared_experts_pattern",
            "shared_experts_gate_pattern",
            "expert_activation",
        ),
        unneeded(TEXT, _FOUND),
    ),
    "has_shared_experts": unneeded(FLAG, _FOUND),
    "route_norm": refused(FLAG, _ROUTING),
    "route_scale": only(1.0, NUMBER, "1 changes nothing", _ROUTING),
    "routed_scaling_factor": refused(NUMBER, _ROUTING),
    "score_func": refused(TEXT, _ROUTING),
    "top_k": refused(COUNT, _ROUTING),
    "load_balance_coeff": refused(NUMBER, _ROUTING),
    "num_expert_groups": refused(COUNT, _ROUTING),
    "num_limited_groups": refused(COUNT, _ROUTING),
}


def _interval(work: Work, key: str, value: Any) -> None:
    if value == 0:
        work.leave(key, value, "nothing is recomputed")
        return
    work.put("strategy.recompute", "full", key)
    work.map(key, value, "strategy.recompute: full (each block by itself, not chunks of several)")


_MODULE = "DeepSpeed reads it nowhere: the arguments of `PipelineModule` say it"
_PIPELINE: Table = {
    "stages": unneeded(COUNT, f"{_MODULE}; in a run description `strategy.layout.pp`"),
    "partition": unneeded(TEXT, f"{_MODULE}; in a run description `strategy.pipeline.split`"),
    "seed_layers": unneeded(FLAG, _MODULE),
    "activation_checkpoint_interval": Key(SIZE, _interval),
    "pipe_partitioned": unneeded(FLAG, "what travels between the parts is never cut further"),
    "grad_partitioned": unneeded(FLAG, "what travels between the parts is never cut further"),
    "use_reentrant": unneeded(FLAG, "recomputing does not go through it"),
}

TABLE: Table = {
    "tensor_parallel": group(_TENSOR_PARALLEL),
    "expert_parallel": switched(_EXPERT_PARALLEL, "expert parallelism is"),
    "pipeline": group(_PIPELINE),
    "sequence_parallel_size": Key(COUNT, _sequence),
    "seq_parallel_communication_data_type": unneeded(
        either(FORMAT, TEXT), "gradients are summed in one format everywhere, `precision.reduce`"
    ),
    "use_data_before_expert_parallelism": unneeded(FLAG, "which ranks share experts does not change the result"),
}
