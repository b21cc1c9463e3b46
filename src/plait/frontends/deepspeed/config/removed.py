"""Names and features that DeepSpeed itself has given up. Each still gets an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.config import show
from plait.errors import Problem
from plait.frontends.deepspeed.config.keys import gone
from plait.frontends.deepspeed.config.work import Table

OLD_NAMES = {
    "bfloat16": "bf16",
    "gradient_accumulation": "gradient_accumulation_steps",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
}
"""Names of top-level keys that were right once, or are often written."""

TABLE: Table = {
    "nebula": gone(
        "Nebula is",
        "write `checkpoint.async_save: true` in the run description",
        "persistent_storage_path",
        "persistent_time_interval",
        "num_of_version_in_retention",
        "enable_nebula_load",
        "load_path",
    ),
    "compression_training": gone("compression is", "models are trained as they are: compress them afterwards"),
    "quantize_training": gone("quantization is", "weights are trained as they are: leave it out"),
    "eigenvalue": gone(
        "eigenvalues are",
        "they were for quantization, which is not there: leave it out",
        "verbose",
        "max_iter",
        "tol",
        "stability",
        "gas_boundary_resolution",
        "layer_name",
        "layer_num",
    ),
    "sparse_attention": gone("sparse attention is", "attention is the model's own: leave it out"),
    "sparse_gradients": gone("sparse gradients are", "gradients of embeddings are dense: leave it out"),
    "elasticity": gone(
        "elasticity is",
        "write `train_batch_size`, and start with `plait launch --elastic_training`: it stays the same at any size",
        "max_train_batch_size",
        "micro_batch_sizes",
        "min_gpus",
        "max_gpus",
        "min_time",
        "version",
        "prefer_larger_batch",
        "ignore_non_elastic_batch_info",
        "num_gpus_per_node",
        "model_parallel_size",
    ),
    "graph_harvesting": gone("graph harvesting is", "write `strategy.compile: {mode: reduce-overhead}`"),
    "curriculum_learning": gone(
        "the curriculum is",
        "samples come in one order, whole: sort or cut the data beforehand",
        "curriculum_type",
        "min_difficulty",
        "max_difficulty",
        "schedule_type",
        "schedule_config",
    ),
    "progressive_layer_drop": gone("layer dropping is", "layers are never dropped: leave it out", "theta", "gamma"),
}


def renamed(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """The configuration under today's names; for each of those its old one; and what stands there under both."""
    names: dict[str, str] = {}
    problems = []
    found: dict[str, Any] = {}
    for key, value in config.items():
        new = OLD_NAMES.get(key, key)
        if new != key and new in config:
            message = f"{show(value)} is an old name of `{new}`, which is there too"
            problems.append(Problem(key, message, "Leave out the old one."))
            continue
        if new != key:
            names[new] = key
        found[new] = value
    return found, names, problems
