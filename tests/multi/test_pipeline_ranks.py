"""What ranks of a pipeline do for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config.model import LlamaConfig
from plait.distributed.materialize import find_initializer, give_storage, initialize
from plait.distributed.pipeline_parallel import Pipeline, input_signature
from plait.distributed.pipeline_split import broadcast_costs, make_stages, plan_stages
from plait.errors import ModelError
from plait.models.llama import Llama
from tests.communication_volume import pipeline_traffic
from tests.multi.pipelines import SEQ, SIZES, VOCAB, batches, build, loss_of
from tests.multi.ranks import RankPool
from tests.refusals import missing
from tests.traffic import SentBytes

CPU = torch.device("cpu")


def make_pipeline(model: Any, schedule: str, **options: Any) -> Pipeline:
    group = dist.group.WORLD
    assert group is not None
    plan = plan_stages(model, ranks=group.size(), schedule=schedule, **options)
    return Pipeline(make_stages(plan, group.rank()), schedule=schedule, group=group, device=CPU)


def answers(rank: int, size: int, schedule: str, count: int) -> list[Tensor]:
    pipeline = make_pipeline(build("llama"), schedule)
    inputs = [{"input_ids": batch["input_ids"]} for batch in batches("llama", count, (2, 1))[0]]
    return pipeline.forward(inputs)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 1), ("interleaved_1f1b", 5), ("zbv", 3)])
def test_forward_alone_answers_where_the_last_stage_is(two_ranks: RankPool, schedule: str, count: int) -> None:
    found = two_ranks.run(answers, schedule, count)
    model = build("llama")
    expected = [model(batch["input_ids"]) for batch in batches("llama", count, (2, 1))[0]]
    last = 0 if schedule == "zbv" else 1
    assert found[1 - last] == []
    for answer, wanted in zip(found[last], expected, strict=True):
        torch.testing.assert_close(answer, wanted)


def from_names(rank: int, size: int, tied: bool) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Llama(LlamaConfig(type="llama", kv_heads=2, tie_embeddings=tied, **SIZES))
    initializer = find_initializer(model)
    assert initializer is not None
    pipeline = make_pipeline(model, "zbv") if size > 1 else None
    modules = [stage.module for stage in pipeline.stages] if pipeline else [model]
    values: dict[str, Tensor] = {}
    for module in modules:
        give_storage(module, CPU)
        initialize(module, initializer, seed=7, device=CPU)
        for name, parameter in module.named_parameters():
            assert name not in values or torch.equal(values[name], parameter)
            values[name] = parameter.detach()
    return values


@pytest.mark.parametrize("tied", [False, True])
def test_first_values_do_not_depend_on_the_split(two_ranks: RankPool, tied: bool) -> None:
    found = two_ranks.run(from_names, tied)
    expected = from_names(0, 1, tied)
    together = found[0] | found[1]
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(together[name], value)


def counted_bytes(rank: int, size: int, schedule: str, count: int) -> tuple[float, int]:
    """What a rank sends in a second step, and what it should."""
    pipeline = make_pipeline(build("llama-tied"), schedule)
    steps = batches("llama-tied", count)
    pipeline.step(steps[0], loss_of)
    with SentBytes() as sent:
        pipeline.step(steps[1], loss_of)
        pipeline.tied.sum()
    dim = SIZES["dim"]
    expected = pipeline_traffic(
        schedule,
        ranks=size,
        rank=rank,
        micro_batches=count,
        activation_bytes=2 * SEQ * dim * 4,
        tied_bytes=VOCAB * dim * 4,
    )
    return sent.bytes, expected


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_what_is_sent_is_what_theory_says(two_ranks: RankPool, schedule: str) -> None:
    for sent, expected in two_ranks.run(counted_bytes, schedule, 4):
        assert sent == expected


def agreed(rank: int, size: int) -> list[float]:
    return broadcast_costs([float(rank), 2.0 * rank + 1.0], CPU)


def test_ranks_agree_on_what_the_first_one_measured(two_ranks: RankPool) -> None:
    assert two_ranks.run(agreed) == [[0.0, 1.0], [0.0, 1.0]]


class Growing(nn.Module):
    """Gives something else each time, for the same inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x).repeat(self.calls, 1)
        return out


def grows(rank: int, size: int) -> str:
    """The second rank takes what comes before the error, and nothing else."""
    pipeline = make_pipeline(nn.Sequential(Growing(), nn.Linear(6, 5)), "gpipe")
    inputs = [torch.randn(2, 6), torch.randn(2, 6)]
    message = ""
    if rank == 1:
        pipeline.transport.receive(0, (0, input_signature(inputs[0]), True)).wait()
    else:
        with pytest.raises(ModelError) as caught:
            pipeline.step(inputs, lambda answer, _inputs, _index: answer.sum())
        message = str(caught.value)
    dist.barrier()
    return message


def test_shapes_that_change_without_the_inputs_are_an_error_and_no_hang(two_ranks: RankPool) -> None:
    message = two_ranks.run(grows)[0]
    assert not missing(message, "float32[2, 6]", "float32[4, 6]")
