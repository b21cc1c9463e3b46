"""A whole step of the real engine, played by one rank of 8, 64 and 1024, sends what theory says, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.communication_volume import context_traffic, data_traffic, expert_traffic, pipeline_traffic, tensor_traffic
from tests.traffic import SentBytes

from plait.config import parse_sections
from plait.distributed.context_parallel_attention import CONTEXT_KINDS, ContextKind
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.models import build_model

WORLDS = pytest.mark.parametrize("size", [8, 64, 1024])
RANK, MICRO, ROWS = 3, 2, 2
GUESS = 8
"""All-reduced in the first step of all: how many targets a step is likely to have, one fp64 number."""
LOSS = 24
"""All-reduced in each step: the sum of the losses, the count of the targets and the stop flag, in fp64."""
NORM = 8
"""All-reduced in each step where ranks hold different parts: the sum of the gradients' squares, in fp64."""

Shapes = list[tuple[int, ...]]


def all_reduced(size: float, ranks: int) -> float:
    return 2 * size * (ranks - 1) / ranks


@dataclass
class Played:
    """What one rank sent in its first step and in the next one."""

    first: SentBytes = field(default_factory=SentBytes)
    second: SentBytes = field(default_factory=SentBytes)
    shapes: Shapes = field(default_factory=list)
    """Of the parameters that this rank has, where they are whole."""
    sent_spec: Any = None
    """The form of what goes from one pipeline stage to the next."""


def play(
    size: int,
    strategy: dict[str, Any],
    model: dict[str, Any],
    *,
    precision: str = "fp32",
    rank: int = RANK,
    micro_batches: int = MICRO,
    foretold: Any = None,
) -> Played:
    played = Played()
    config = parse_sections(model=model, strategy=strategy, precision=precision, optim={"type": "AdamW"}).config
    with fake_world(config, rank=rank, size=size) as world:
        engine = prepare_native(Preparation(config, world, accumulation=micro_batches))
        played.shapes = [tuple(parameter.shape) for parameter in engine.model.parameters()]
        staged = engine._staged
        if staged is not None:
            staged.pipeline.transport.expected_spec = foretold
        ids = torch.zeros(ROWS, model["seq_len"], dtype=torch.int64)
        for step in (played.first, played.second):
            with step:
                engine.train_step([{"input_ids": ids, "labels": ids}] * micro_batches)
        if staged is not None:
            played.sent_spec = staged.pipeline.transport.sent_spec
    return played


def llama(**sizes: Any) -> dict[str, Any]:
    common = {"vocab_size": 96, "dim": 64, "layers": 2, "heads": 8, "kv_heads": 4, "ffn_dim": 80, "seq_len": 16}
    return {"type": "llama", **common, **sizes}


def parameters(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        whole = build_model(parse_sections(model=model).config.model)  # type: ignore[arg-type]
    return {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


def cut(model: dict[str, Any], tp: int) -> Shapes:
    """One rank's part of each parameter, where `tp` ranks share them."""
    by_rows = (".q.weight", ".gate.weight", ".up.weight", "embedding.weight", "head.weight")
    if model["kv_heads"] % tp == 0:
        by_rows += (".k.weight", ".v.weight")
    shapes = []
    for name, shape in parameters(model).items():
        if name.endswith(by_rows):
            shapes.append((shape[0] // tp, *shape[1:]))
        elif name.endswith((".out.weight", ".down.weight")):
            shapes.append((shape[0], shape[1] // tp))
        else:
            shapes.append(shape)
    return shapes


# ---- data parallel


@WORLDS
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_send_gradients_and_what_their_stage_shards(size: int, stage: int) -> None:
    model = llama()
    played = play(size, {"layout": {"dp_shard": size}, "zero": stage}, model, precision="bf16")
    theory = data_traffic(
        stage=stage, shapes=parameters(model).values(), shards=size, micro_batches=MICRO, itemsize=2, reduced_itemsize=4
    )
    small = LOSS + (NORM if stage else 0)
    assert played.second.bytes == theory + all_reduced(small, size)
    assert played.first.bytes == theory + all_reduced(small + GUESS, size)


@WORLDS
@pytest.mark.parametrize("stage", [1, 3])
def test_copies_of_shards_sum_their_gradients_too(size: int, stage: int) -> None:
    model, copies = llama(), size // 4
    played = play(size, {"layout": {"dp_replicate": copies, "dp_shard": 4}, "zero": stage}, model)
    theory = data_traffic(stage=stage, shapes=parameters(model).values(), shards=4, copies=copies, micro_batches=MICRO)
    assert played.second.bytes == theory + all_reduced(LOSS, size) + all_reduced(NORM, 4)


# ---- tensor and sequence parallel


def norms(model: dict[str, Any]) -> int:
    """Parameters of the norms inside blocks."""
    return int(2 * model["layers"] * model["dim"])


@pytest.mark.parametrize(
    ("size", "precision", "itemsize"),
    [(8, "fp32", 4), (64, "fp32", 4), (1024, "fp32", 4), (8, "bf16", 2), (64, "bf16", 2)],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_ranks_send_activations(size: int, sequence: bool, precision: str, itemsize: int) -> None:
    model = llama(vocab_size=2 * size, dim=2 * size, heads=size, kv_heads=size, ffn_dim=size, seq_len=size)
    strategy = {"layout": {"tp": size}, "tensor": {"sequence_parallel": sequence}}
    theory = tensor_traffic(
        tokens=ROWS * size,
        dim=2 * size,
        layers=2,
        sequence=sequence,
        itemsize=itemsize,
        shared=norms(model) if sequence else 0,
    )
    played = play(size, strategy, model, precision=precision)
    assert played.second.bytes == MICRO * theory.sent(size) + all_reduced(LOSS + NORM, size)


@WORLDS
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_ranks_with_shards_send_both_in_half_precision(size: int, sequence: bool) -> None:
    tp, shards = 4, size // 4
    model = llama(kv_heads=2, ffn_dim=96)  # fewer key-value heads than ranks: each has them all
    strategy = {
        "layout": {"tp": tp, "dp_shard": shards},
        "zero": 3,
        "tensor": {"sequence_parallel": sequence},
        "recompute": "full",
    }
    keys_and_values = 2 * 2 * (2 * 8) * 64
    theory = tensor_traffic(
        tokens=ROWS * 16,
        dim=64,
        layers=2,
        sequence=sequence,
        itemsize=2,
        recompute=True,
        shared=keys_and_values + (norms(model) if sequence else 0),
    )
    sharding = data_traffic(stage=3, shapes=cut(model, tp), shards=shards, micro_batches=MICRO, itemsize=2)
    played = play(size, strategy, model, precision="bf16")
    assert played.second.bytes == MICRO * theory.sent(tp) + sharding + all_reduced(LOSS + NORM, size)


# ---- context parallel


@WORLDS
@pytest.mark.parametrize("kind", CONTEXT_KINDS)
def test_ranks_that_share_rows_send_keys_and_values_or_heads(size: int, kind: ContextKind) -> None:
    # A thousand steps of a ring are many to play.
    cp = size if kind == "ulysses" else min(size, 64)
    heads = max(cp, 8) if kind == "ulysses" else 8
    model = llama(dim=2 * heads, heads=heads, kv_heads=heads // 4, layers=1, seq_len=2 * cp)
    strategy = {"layout": {"cp": cp, "dp_shard": size // cp}, "context": {"kind": kind}}
    theory = context_traffic(
        kind,
        size=cp,
        batch=ROWS,
        tokens=2 * cp,
        heads=heads,
        kv_heads=heads // 4,
        head_dim=2,
        layers=1,
        element_size=2,
    )
    gradients = data_traffic(stage=0, shapes=parameters(model).values(), shards=size)
    played = play(size, strategy, model, precision="bf16", micro_batches=1)
    assert played.second.bytes == sum(theory) + gradients + all_reduced(LOSS, size)


# ---- expert parallel


@WORLDS
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_that_share_experts_send_tokens(size: int, recompute: str) -> None:
    model = llama(type="moe", experts=1024, expert_dim=32, top_k=8, ffn_dim=None, seq_len=64)
    strategy = {"layout": {"ep": size}, "recompute": recompute}
    theory = expert_traffic(
        tokens=MICRO * ROWS * 64,
        dim=64,
        itemsize=2,
        top_k=8,
        experts=1024,
        ep=size,
        mixtures=2,
        micro_batches=MICRO,
        recomputed=2 if recompute == "full" else 0,
    )
    dense = [shape for name, shape in parameters(model).items() if ".experts." not in name]
    gradients = data_traffic(stage=0, shapes=dense, shards=size)
    played = play(size, strategy, model, precision="bf16")
    assert played.second.bytes == theory + gradients + all_reduced(LOSS + NORM, size)


@pytest.mark.parametrize(
    ("size", "sequence", "recompute", "beside"),
    [
        (8, False, "none", 0),
        (64, False, "full", 1),
        (1024, False, "none", 1),
        (8, True, "full", 1),
        (64, True, "none", 1),
        (1024, True, "full", 0),
    ],
)
def test_tensor_parallel_ranks_share_what_is_sent_to_experts(
    size: int, sequence: bool, recompute: str, beside: int
) -> None:
    tp, ep = 4, size // 4
    model = llama(type="moe", experts=1024, expert_dim=32, top_k=8, ffn_dim=None, shared_experts=beside, seq_len=64)
    strategy = {
        "layout": {"tp": tp, "ep": ep},
        "recompute": recompute,
        "tensor": {"sequence_parallel": sequence},
    }
    again = recompute == "full"
    sent = expert_traffic(
        tokens=MICRO * ROWS * 64,
        dim=64,
        itemsize=2,
        top_k=8,
        experts=1024,
        ep=ep,
        tp=tp,
        mixtures=2,
        micro_batches=MICRO,
        recomputed=2 if again else 0,
    )
    summed = tensor_traffic(
        tokens=ROWS * 64,
        dim=64,
        layers=2,
        sequence=sequence,
        itemsize=2,
        recompute=again,
        shared=norms(model) if sequence else 0,
        mixtures=2,
        top_k=8,
        beside=bool(beside),
    )
    played = play(size, strategy, model, precision="bf16")
    dense = [shape for name, shape in zip(parameters(model), cut(model, tp), strict=True) if ".experts." not in name]
    gradients = data_traffic(stage=0, shapes=dense, shards=ep)
    assert played.second.bytes == sent + MICRO * summed.sent(tp) + gradients + all_reduced(LOSS + NORM, size)


# ---- pipeline parallel


@WORLDS
@pytest.mark.parametrize(("schedule", "tied"), [("1f1b", False), ("interleaved_1f1b", True)])
def test_pipeline_stages_send_activations_and_gradients(size: int, schedule: str, tied: bool) -> None:
    pp = 4 if size == 8 else 8
    replicas = size // pp
    model = llama(layers=2 * pp, tie_embeddings=tied)
    strategy = {"layout": {"pp": pp, "dp_shard": replicas}, "pipeline": {"schedule": schedule}}
    foretold = None
    for stage in (0, pp // 2, pp - 1):
        played = play(size, strategy, model, micro_batches=4, rank=stage * replicas, foretold=foretold)
        foretold = played.sent_spec
        theory = pipeline_traffic(
            schedule,
            ranks=pp,
            rank=stage,
            micro_batches=4,
            activation_bytes=ROWS * 16 * 64 * 4,
            tied_bytes=96 * 64 * 4 if tied else 0,
        )
        gradients = data_traffic(stage=0, shapes=played.shapes, shards=replicas)
        assert played.second.bytes == theory + gradients + all_reduced(LOSS + NORM, size)
