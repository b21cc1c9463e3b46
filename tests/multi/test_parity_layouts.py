"""Promise 1 for every axis and their products: any layout equals one process."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.fake import fake_world
from plait.engine import Preparation, prepare_native
from plait.errors import ConfigError, ModelError
from plait.models import LossTerm
from tests.multi.parity import MODEL, Trace, assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import missing, refused

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Of each tensor's largest value, in bf16 of its norm."""


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8, timeout_s=240)
    yield pool
    pool.close()


@pytest.fixture
def pools(two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {2: two_ranks, 4: four_ranks}


MOE = {
    **{key: value for key, value in MODEL.items() if key != "type"},
    "type": "moe",
    "experts": 4,
    "top_k": 2,
    "expert_dim": 16,
}


class ClosestChoice(TorchFunctionMode):
    """Sees how far apart the last expert that was chosen and the first that was not ever came."""

    def __init__(self) -> None:
        super().__init__()
        self.gap = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and args[1] < args[0].shape[-1]:
            best = args[0].detach().topk(args[1] + 1).values
            self.gap = min(self.gap, float((best[..., -2] - best[..., -1]).min()))
        return func(*args, **(kwargs or {}))


CLEAR = 2e-6
"""Scores of two layouts are some 1e-7 apart. In one run of two hundred a choice is as close as that: its token goes
elsewhere then, and nothing agrees any more. Batches with a choice closer than this are not taken: about one in ten."""


@functools.cache
def batches(model: str, micro_batches: int) -> tuple[int, list[list[Any]], Trace]:
    """A seed, its batches, and what one process makes of them in fp32; `model` as json."""
    chance = random.Random(random.randrange(10**9))  # a run seeds `random` itself, and would draw the same again
    while True:
        seed = chance.randrange(10**6)
        steps = token_batches(seed, micro_batches)
        with ClosestChoice() as choices:
            trace = run_steps(0, 1, {"model": json.loads(model), "precision": "fp32"}, steps)
        if choices.gap > CLEAR:
            return seed, steps, trace


@functools.cache
def alone(model: str, precision: str, micro_batches: int) -> Trace:
    """What one process makes of the same batches."""
    _, steps, trace = batches(model, micro_batches)
    if precision == "fp32":
        return trace
    return run_steps(0, 1, {"model": json.loads(model), "precision": precision}, steps)


def compare(
    pool: RankPool,
    sections: dict[str, Any],
    *,
    precisions: Sequence[str] = ("fp32", "bf16"),
    micro_batches: int = 4,
    tolerance: float | None = None,
    noise: str = "",
    noise_in_bf16: str = "",
) -> None:
    """Train the same micro-batches on one process and on all ranks; for `noise` see `assert_same`."""
    model = json.dumps(sections["model"])
    seed, steps, _ = batches(model, micro_batches)
    print(f"seed {seed}")
    everybody = pool.run(run_layout, sections, steps, precisions)
    for index, precision in enumerate(precisions):
        expected = alone(model, precision, micro_batches)
        traces = [traces[index] for traces in everybody]
        # Each rank of a pipeline has its own layers; all of them together are the model.
        everything = {name: tensor for trace in traces for name, tensor in trace.tensors.items()}
        rounds = precision == "bf16"
        for found in traces:
            found.tensors = {**everything, **found.tensors}
            # In bf16 single entries drift: a layer that is cut rounds other partial sums than a whole one.
            unlike = (noise_in_bf16 if rounds else "") or noise
            assert_same(found, expected, tolerance=tolerance or TOLERANCE[precision], noise=unlike, by_norm=rounds)


def run_layout(rank: int, size: int, sections: dict[str, Any], steps: Any, precisions: Sequence[str]) -> list[Trace]:
    """One run after another in one world, for ranks of which several see the same samples."""
    world = open_world(parse_sections(**sections).config)
    share, shares = world.data_rank, world.layout.data_parallel
    return [run_steps(share, shares, {**sections, "precision": each}, steps, world=world) for each in precisions]


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"layout": {"tp": 2}}),
    "tp2 sp": (2, {"layout": {"tp": 2}, "tensor": {"sequence_parallel": True}}),
    "cp2 ring": (2, {"layout": {"cp": 2}}),
    "cp2 ulysses": (2, {"layout": {"cp": 2}, "context": {"kind": "ulysses"}}),
    "cp2 zero3": (2, {"layout": {"cp": 2}, "zero": 3}),
    "dp2 tp2": (4, {"layout": {"tp": 2}}),
    "dp2 tp2 zero1": (4, {"layout": {"tp": 2}, "zero": 1}),
    "dp2 tp2 zero3": (4, {"layout": {"tp": 2}, "zero": 3}),
    "dp2 tp2 sp zero3": (4, {"layout": {"tp": 2}, "zero": 3, "tensor": {"sequence_parallel": True}}),
    "cp2 tp2": (4, {"layout": {"cp": 2, "tp": 2}}),
    "cp2 tp2 zero3": (4, {"layout": {"cp": 2, "tp": 2}, "zero": 3}),
    "dp2 cp2 zero1": (4, {"layout": {"cp": 2}, "zero": 1}),
    "pp2": (2, {"layout": {"pp": 2}}),
    "dp2 pp2": (4, {"layout": {"pp": 2}}),
    "dp2 pp2 zero1": (4, {"layout": {"pp": 2}, "zero": 1}),
    "dp2 pp2 zero3": (4, {"layout": {"pp": 2}, "zero": 3}),
    "tp2 pp2": (4, {"layout": {"pp": 2, "tp": 2}}),
    "tp2 sp pp2": (4, {"layout": {"pp": 2, "tp": 2}, "tensor": {"sequence_parallel": True}}),
}
"""Name → ranks, strategy."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(pools: dict[int, RankPool], name: str) -> None:
    size, strategy = LAYOUTS[name]
    compare(pools[size], {"model": MODEL, "strategy": strategy})


def test_pipelines_side_by_side_may_have_rows_of_different_lengths(four_ranks: RankPool) -> None:
    """As in the last batch of an epoch, or where examples are not packed."""
    steps = [[step[0], {name: rows[:1, :5] for name, rows in step[1].items()}] for step in token_batches(0, 2)]
    expected = run_steps(0, 1, {"model": MODEL}, steps)
    found = [traces[0] for traces in four_ranks.run(run_layout, {"strategy": {"layout": {"pp": 2}}}, steps, ["fp32"])]
    everything = {name: tensor for trace in found for name, tensor in trace.tensors.items()}
    for trace in found:
        trace.tensors = {**everything, **trace.tensors}
        assert_same(trace, expected, tolerance=TOLERANCE["fp32"])


GPT = {**{key: value for key, value in MODEL.items() if key != "kv_heads"}, "type": "gpt", "dropout": 0.0}


def mean_of(outputs: LossTerm, _inputs: Any) -> Tensor:
    return outputs.sum / outputs.count


def answers_to_a_mean(rank: int, size: int, sections: dict[str, Any], batch: Any) -> list[str]:
    config = parse_sections(**sections).config
    engine = prepare_native(Preparation(config, open_world(config), loss_function=mean_of))
    told = []
    for call in (lambda: engine.train_step([batch]), lambda: engine.evaluate_micro_batch(batch)):
        with pytest.raises(ModelError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_a_mean_over_a_part_of_the_tokens_is_refused_in_training_and_evaluation(two_ranks: RankPool) -> None:
    sections = {"model": MODEL, "strategy": {"layout": {"cp": 2}}}
    for told in two_ranks.run(answers_to_a_mean, sections, token_batches(5, 1)[0][0]):
        assert len(told) == 2
        assert all(not missing(text, "strategy.layout.cp", "LossTerm(sum, count)") for text in told)


@pytest.mark.parametrize("name", ["tp2", "tp2 sp", "dp2 tp2 zero1"])
def test_layers_with_biases_and_a_tied_head_equal_one_process(pools: dict[int, RankPool], name: str) -> None:
    size, strategy = LAYOUTS[name]
    sections = {"model": GPT, "strategy": strategy}
    # What is added to all keys alike does not change where attention goes: its gradient is rounding.
    compare(pools[size], sections, precisions=["fp32"], noise="k.bias")
    # The gradient of a norm is small beside what it is the sum of.
    compare(pools[size], sections, precisions=["bf16"], tolerance=5e-2, noise="k.bias")


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_equals_one_process_under_every_schedule(two_ranks: RankPool, schedule: str) -> None:
    strategy = {"layout": {"pp": 2}, "pipeline": {"schedule": schedule}}
    compare(two_ranks, {"model": {**MODEL, "layers": 4}, "strategy": strategy}, precisions=["fp32"])


V_SHAPED: dict[str, tuple[int, dict[str, Any]]] = {
    "zbv": (2, {"layout": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "dualpipev": (2, {"layout": {"pp": 2}, "pipeline": {"schedule": "dualpipev"}}),
    "dp2 zbv": (4, {"layout": {"pp": 2}, "pipeline": {"schedule": "zbv"}}),
    "tp2 dualpipev": (4, {"layout": {"pp": 2, "tp": 2}, "pipeline": {"schedule": "dualpipev"}}),
    "dp2 zbv zero1": (4, {"layout": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "zero": 1}),
    "dp2 zbv zero3": (4, {"layout": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "zero": 3}),
    "dp2 zbv zero2": (4, {"layout": {"pp": 2}, "pipeline": {"schedule": "zbv"}, "zero": 2}),
}


@pytest.mark.parametrize("name", V_SHAPED)
def test_a_rank_with_both_ends_of_a_tied_model_has_one_embedding(pools: dict[int, RankPool], name: str) -> None:
    size, strategy = V_SHAPED[name]
    sections = {"model": {**MODEL, "layers": 4, "tie_embeddings": True}, "strategy": strategy}
    compare(pools[size], sections, precisions=["fp32"], tolerance=1e-4)  # two summands of a gradient nearly cancel
    compare(pools[size], sections, precisions=["bf16"])


@pytest.mark.parametrize("rank", range(4))
def test_an_embedding_that_two_stages_of_a_rank_would_offload_is_refused_by_all(rank: int) -> None:
    strategy = {**V_SHAPED["dp2 zbv zero3"][1], "offload": {"optimizer": "cpu"}}
    config = parse_sections(model={**MODEL, "layers": 4, "tie_embeddings": True}, strategy=strategy).config
    with (
        fake_world(config, rank=rank, size=4) as world,
        refused(ConfigError, strategy["pipeline"]["schedule"], "embedding.weight"),
    ):
        prepare_native(Preparation(config, world))


EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"layout": {"ep": 2}}),
    "ep2 zero3": (2, {"layout": {"ep": 2}, "zero": 3}),
    "ep2 dp2": (4, {"layout": {"ep": 2}}),
    "ep2 dp2 zero1": (4, {"layout": {"ep": 2}, "zero": 1}),
    "ep2 dp2 zero3": (4, {"layout": {"ep": 2}, "zero": 3}),
    "ep2 pp2": (4, {"layout": {"ep": 2, "pp": 2}}),
    "ep2 cp2 zero3": (4, {"layout": {"ep": 2, "cp": 2}, "zero": 3}),
    "tp2": (2, {"layout": {"tp": 2}}),
}


@pytest.mark.parametrize("zero", [0, 3])
def test_a_pipeline_stage_may_have_no_experts(four_ranks: RankPool, zero: int) -> None:
    model = {**MOE, "moe_every": MOE["layers"]}  # in the last layer alone
    strategy = {"layout": {"ep": 2, "pp": 2}, "zero": zero}
    compare(four_ranks, {"model": model, "strategy": strategy}, precisions=["fp32"])


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_are_spread_equal_one_process(pools: dict[int, RankPool], name: str) -> None:
    size, strategy = EXPERTS[name]
    # In bf16 a token whose two best experts are nearly equal may choose the other one: only losses and norms agree.
    compare(pools[size], {"model": MOE, "strategy": strategy}, noise_in_bf16=".")


RICH = {**MOE, "shared_experts": 1, "balance_loss": 0.3, "z_loss": 0.1, "bias_rate": 0.05}
TIGHT = {**MOE, "capacity_factor": 1.0, "moe_every": 2, "score": "sigmoid", "ffn_dim": 32}
UNEVEN = {**MOE, "experts": 3}
SEQUENCE = {"tensor": {"sequence_parallel": True}}
SHARED_EXPERTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2, with a capacity": (2, TIGHT, {"layout": {"tp": 2}, "recompute": "full"}),
    "tp2 sp": (2, RICH, {"layout": {"tp": 2}, **SEQUENCE}),
    "tp2 ep2, with six experts": (4, {**RICH, "experts": 6}, {"layout": {"tp": 2, "ep": 2}}),
    "tp2 ep2 sp zero3": (4, RICH, {"layout": {"tp": 2, "ep": 2}, "zero": 3, **SEQUENCE, "recompute": "full"}),
    "tp2 ep2 sp zero1, with a capacity": (4, TIGHT, {"layout": {"tp": 2, "ep": 2}, "zero": 1, **SEQUENCE}),
    "tp2 cp2 zero2": (4, RICH, {"layout": {"tp": 2, "cp": 2}, "zero": 2}),
    "tp2 pp2": (4, RICH, {"layout": {"tp": 2, "pp": 2}}),
    "tp2 dp2 zero3, with three experts": (4, UNEVEN, {"layout": {"tp": 2}, "zero": 3}),
    "tp4, with three experts": (4, UNEVEN, {"layout": {"tp": 4}}),
}
"""Name → ranks, model, strategy."""


FILLED: dict[str, dict[str, Any]] = {
    "cp4": {"layout": {"cp": 4}},
    "pp2 cp2": {"layout": {"pp": 2, "cp": 2}},
    "cp2 tp2 sp": {"layout": {"cp": 2, "tp": 2}, **SEQUENCE, "recompute": "full"},
    "ep2 cp2 zero3": {"layout": {"ep": 2, "cp": 2}, "zero": 3},
}


@pytest.mark.parametrize("name", FILLED)
def test_routers_do_not_count_what_fills_rows_up(four_ranks: RankPool, name: str) -> None:
    steps = [[{key: rows[:, :10] for key, rows in batch.items()} for batch in step] for step in token_batches(0, 4)]
    expected = run_steps(0, 1, {"model": RICH}, steps)
    found = four_ranks.run(run_layout, {"model": RICH, "strategy": FILLED[name]}, steps, ["fp32"])
    everything = {name: tensor for traces in found for name, tensor in traces[0].tensors.items()}
    for (trace,) in found:
        trace.tensors = {**everything, **trace.tensors}
        assert_same(trace, expected, tolerance=TOLERANCE["fp32"])


@pytest.mark.parametrize("name", SHARED_EXPERTS)
def test_experts_that_tensor_parallel_ranks_share_equal_one_process(pools: dict[int, RankPool], name: str) -> None:
    size, model, strategy = SHARED_EXPERTS[name]
    precisions = ["fp32", "bf16"] if name in ("tp2 sp", "tp2 ep2 sp zero3") else ["fp32"]
    compare(pools[size], {"model": model, "strategy": strategy}, precisions=precisions, noise_in_bf16=".")


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_on_all_three_axes_equal_one_process(eight_ranks: RankPool, zero: int) -> None:
    strategy = {"layout": {"tp": 2, "ep": 2, "dp_shard": 2}, "zero": zero, **SEQUENCE}
    compare(eight_ranks, {"model": RICH, "strategy": strategy}, precisions=["fp32"])


DEEP = {**MODEL, "layers": 8}
WIDE: dict[str, dict[str, Any]] = {
    "dp2 tp2 pp2": {"layout": {"pp": 2, "tp": 2}},
    "dp2 tp2 pp2 zero1": {"layout": {"pp": 2, "tp": 2}, "zero": 1},
    "dp2 tp2 pp2 zero3": {"layout": {"pp": 2, "tp": 2}, "zero": 3},
    "pp4 interleaved dp2": {"layout": {"pp": 4}, "pipeline": {"schedule": "interleaved_1f1b"}},
}


@pytest.mark.parametrize("name", WIDE)
def test_three_axes_on_eight_ranks_equal_one_process(eight_ranks: RankPool, name: str) -> None:
    sections = {"model": DEEP, "strategy": WIDE[name]}
    compare(eight_ranks, sections, precisions=["fp32"], micro_batches=8, tolerance=1e-4)  # it is deep


COMMON = {"vocab_size": 61, "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4}
HF: dict[str, dict[str, Any]] = {
    "llama": {
        **COMMON,
        "model_type": "llama",
        "intermediate_size": 32,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": 0.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_layer": 2,
        "n_embd": 24,
        "n_head": 4,
        "n_positions": 32,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "mixtral": {
        **COMMON,
        "model_type": "mixtral",
        "intermediate_size": 16,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
        "sliding_window": None,
    },
}


@pytest.mark.parametrize(("model", "axis"), [*itertools.product(HF, ("tp", "pp", "cp")), ("mixtral", "ep")])
def test_unedited_transformers_models_equal_one_process(two_ranks: RankPool, model: str, axis: str) -> None:
    sections = {"model": {"type": "hf", "config": HF[model]}, "strategy": {"layout": {axis: 2}}}
    compare(two_ranks, sections, precisions=["fp32"])


def test_the_stages_of_an_unedited_llama_are_cut_as_well(four_ranks: RankPool) -> None:
    strategy = {"layout": {"pp": 2, "tp": 2}, **SEQUENCE}
    compare(four_ranks, {"model": {"type": "hf", "config": HF["llama"]}, "strategy": strategy}, precisions=["fp32"])


def test_the_experts_of_an_unedited_mixtral_are_shared_along_two_axes(four_ranks: RankPool) -> None:
    strategy = {"layout": {"tp": 2, "ep": 2}, "zero": 3, **SEQUENCE}
    compare(four_ranks, {"model": {"type": "hf", "config": HF["mixtral"]}, "strategy": strategy}, precisions=["fp32"])
