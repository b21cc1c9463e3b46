"""`compile`: DeepCompile is torch.compile with passes of its own."""

from __future__ import annotations

from plait.frontends.deepspeed.config.keys import group, off, refused, unneeded
from plait.frontends.deepspeed.config.kinds import FLAG, SIZE, TEXTS
from plait.frontends.deepspeed.config.work import Key, Table, Work

_GRAPH = "it belongs to passes of DeepCompile's own"


def _deepcompile(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("strategy.compile", True, key)
        work.map(key, value, "strategy.compile: true (blocks are compiled, and sharded one by one)")
    else:
        work.leave(key, value, "it is off")


def _activations(work: Work, key: str, value: bool) -> None:
    if value:
        work.put("strategy.offload.activations", "all", key)
        work.map(key, value, "strategy.offload.activations: all")
    else:
        work.leave(key, value, "it is off")


_COMPILE: Table = {
    "deepcompile": Key(FLAG, _deepcompile),
    "offload_activation": Key(FLAG, _activations),
    "offload_opt_states": off("write `zero_optimization.offload_optimizer`"),
    "offload_parameters": off("write `zero_optimization.offload_param`"),
    "passes": refused(TEXTS, "leave it out: tensor and sequence parallelism are axes of `strategy.layout`"),
    **dict.fromkeys(
        (
            "autoep_non_moe",
            "free_activation",
            "offload_activation_pin_memory",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
        ),
        unneeded(FLAG, _GRAPH),
    ),
    "free_activation_threshold": unneeded(SIZE, _GRAPH),
}

TABLE: Table = {"compile": group(_COMPILE)}
