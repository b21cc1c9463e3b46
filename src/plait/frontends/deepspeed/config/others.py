"""What fits into no larger section: recomputing, generating, data."""

from __future__ import annotations

from plait.frontends.deepspeed.config.keys import gone, group, refused, switched, unneeded
from plait.frontends.deepspeed.config.kinds import COUNT, FLAG, SIZE
from plait.frontends.deepspeed.config.work import Key, Table, Work


def _on_host(work: Work, key: str, value: bool) -> None:
    if value:
        work.map(key, value, "`deepspeed.checkpointing` does so; in a run description `strategy.offload.activations`")
    else:
        work.leave(key, value, "it is off")


_RECOMPUTE = "the script says what is recomputed; in a run description `strategy.recompute` does"
ACTIVATIONS: Table = {
    "partition_activations": unneeded(
        FLAG, "with tensor parallelism `strategy.tensor.sequence_parallel` spreads them; alone there is nothing to cut"
    ),
    "cpu_checkpointing": Key(FLAG, _on_host),
    "contiguous_memory_optimization": unneeded(FLAG, "the allocator is torch's own"),
    "number_checkpoints": unneeded(SIZE, _RECOMPUTE),
    "synchronize_checkpoint_boundary": unneeded(FLAG, "streams wait for each other only where they must"),
    "profile": unneeded(FLAG, "the log has time and memory of every step"),
}

_OF_HYBRID = "it belongs to the hybrid engine"
_HYBRID: Table = {
    "enabled": refused(FLAG, "one model trains and generates here: leave it out, and generate with the model itself"),
    **dict.fromkeys(("max_out_tokens", "inference_tp_size", "tp_gather_partition_size"), unneeded(COUNT, _OF_HYBRID)),
    **dict.fromkeys(("release_inference_cache", "pin_parameters", "enable_cuda_graph"), unneeded(FLAG, _OF_HYBRID)),
}


def _drop_last(work: Work, key: str, value: bool) -> None:
    if value:
        work.map(key, value, "the loader of `initialize` does so; in a run description write `data.drop_last: true`")
    else:
        work.leave(key, value, "the last, smaller batch is kept")


TABLE: Table = {
    "activation_checkpointing": group(ACTIVATIONS),
    "hybrid_engine": switched(_HYBRID, "the hybrid engine is"),
    "dataloader_drop_last": Key(FLAG, _drop_last),
    "data_efficiency": gone(
        "data efficiency is",
        "samples come in one order, whole: sort or cut the data beforehand",
        "seed",
        "data_sampling",
        "data_routing",
    ),
    "weight_quantization": gone("quantization is", "weights are trained as they are: leave it out"),
    "disable_python_gc": unneeded(FLAG, "it changes no result"),
    "vocabulary_size": unneeded(COUNT, "DeepSpeed only warns about it; the `model` section has its own"),
}
