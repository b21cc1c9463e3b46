"""What a pipeline does, seen in a group of one rank that holds all stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.refusals import missing, refused
from torch import Tensor, nn

from plait.distributed.pipeline_parallel import BubbleClock, OutputSpec, Pipeline, flatten_output, input_signature
from plait.distributed.pipeline_split import Stage, make_stages, plan_stages
from plait.errors import ConfigError, ModelError


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


def make_pipeline(model: Any, group: dist.ProcessGroup, schedule: str = "zbv", **options: Any) -> Pipeline:
    stages = make_stages(plan_stages(model, ranks=1, schedule=schedule, **options), 0)
    return Pipeline(stages, schedule=schedule, group=group, device=torch.device("cpu"))


def squares(answer: Tensor, _inputs: Any, _index: int) -> Tensor:
    return answer.square().sum()


def test_collectors_hear_of_each_backward_pass_and_of_the_last(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group)
    heard: list[tuple[int, bool]] = []

    def hear(stage: Stage, last: bool) -> None:
        heard.append((stage.index, last))

    pipeline.step([torch.randn(2, 3) for _ in range(4)], squares, hear)
    for stage in (0, 1):
        assert [last for index, last in heard if index == stage] == [False, False, False, True]


def test_the_loss_is_told_which_micro_batch_it_is_of(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group)
    seen = {}

    def loss_of(answer: Tensor, inputs: Any, index: int) -> Tensor:
        seen[index] = inputs["number"]
        return answer.sum()

    pipeline.step([{"x": torch.randn(2, 3), "number": 10 * i} for i in range(3)], loss_of)
    assert seen == {0: 0, 1: 10, 2: 20}


def test_forward_alone_answers_in_order_and_keeps_no_graph(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    batches = [torch.randn(i + 1, 3) for i in range(5)]
    expected = [model(x).detach() for x in batches]
    pipeline = make_pipeline(model, group)
    answers = pipeline.forward(batches)
    assert not any(answer.requires_grad for answer in answers)
    for answer, wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, wanted)
    assert pipeline.forward([]) == []


class Fails(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return x


def test_an_error_names_the_stage_and_the_micro_batch(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Fails(ValueError("bad")))
    with pytest.raises(ValueError, match="bad") as caught:
        make_pipeline(model, group).step([torch.randn(2, 3)] * 4, squares)
    (note,) = caught.value.__notes__
    assert not missing(note, "forward", "stage 1", "micro-batch 2")


def test_an_error_of_ours_names_them_in_its_text(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Fails(ModelError("bad")))
    with refused(ModelError, "bad\n", "forward", "stage 1", "micro-batch 2"):
        make_pipeline(model, group).step([torch.randn(2, 3)] * 4, squares)


def test_an_illegal_number_of_micro_batches_is_refused_before_anything_runs(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group, "dualpipev")
    with refused(ConfigError, "1 micro-batch", "dualpipev", "2", key="strategy.pipeline.micro_batches"):
        pipeline.step([torch.randn(2, 3)], squares)


def test_a_loss_that_is_no_number_is_refused(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group)
    with refused(ModelError, "loss", "tensor", "stage 1", "micro-batch 0"):
        pipeline.step([torch.randn(2, 3)], lambda answer, _inputs, _index: answer)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_frozen_stages_take_part(group: dist.ProcessGroup, schedule: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    model(x).square().sum().backward()
    expected = model[1].weight.grad.clone()
    model.zero_grad()
    pipeline = make_pipeline(model, group, schedule)
    pipeline.step([x], squares)
    torch.testing.assert_close(pipeline.stages[1].module.get_parameter("1.weight").grad, expected)
    assert pipeline.stages[0].module.get_parameter("0.weight").grad is None


def test_a_loss_without_a_graph_gives_zeros(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group)
    pipeline.step([torch.randn(2, 3)] * 2, lambda answer, _inputs, index: answer.detach().sum() * index)
    gradient = pipeline.stages[0].module.get_parameter("0.weight").grad
    assert gradient is None or not gradient.any()


def test_the_measured_bubble_is_a_share(group: dist.ProcessGroup) -> None:
    pipeline = make_pipeline(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group)
    assert pipeline.bubble() is None
    for _ in range(3):
        pipeline.step([torch.randn(2, 3)] * 4, squares)
    bubble = pipeline.bubble()
    assert bubble is not None
    assert 0.0 <= bubble.measured < 1.0
    assert bubble.theoretical == pytest.approx(0.0)


class Scripted(BubbleClock):
    """A clock that shows what it was told to."""

    def __init__(self, *times: float) -> None:
        super().__init__(torch.device("cpu"))
        self._times = iter(times)

    def _now(self) -> float:
        return next(self._times)


def test_the_first_step_is_left_out_once_there_is_another() -> None:
    # step begins, work begins, work ends, step ends
    clock = Scripted(0, 1, 6, 10, 20, 21, 23, 24, 30, 30, 31, 32)
    found = []
    for _ in range(3):
        with clock.step(), clock.work():
            pass
        found.append(clock.busy_and_whole())
    assert found == [(5.0, 10.0), (2.0, 4.0), (3.0, 6.0)]


def test_router_losses_of_earlier_stages_are_not_lost_without_a_word() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=8, num_hidden_layers=2, output_router_logits=True
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with refused(ModelError, "MixtralForCausalLM", "output_router_logits: false"):
        plan_stages(model, ranks=2, schedule="1f1b")


def test_a_form_survives_being_written() -> None:
    output = {"a": (torch.zeros(2, 3), torch.zeros(0, dtype=torch.int64)), "b": "word", "c": None}
    form, tensors = flatten_output(output)
    again = OutputSpec.deserialize(form.serialize())
    assert again == form
    filled = again.fill(tensors)
    assert filled["a"][0] is output["a"][0]
    assert (filled["b"], filled["c"]) == ("word", None)


def test_inputs_of_one_form_have_equal_shapes_and_plain_values() -> None:
    base = {"x": torch.zeros(2, 3), "n": 4}
    assert input_signature(base) == input_signature({"x": torch.ones(2, 3), "n": 4})
    assert input_signature(base) != input_signature({"x": torch.zeros(2, 2), "n": 4})
    assert input_signature(base) != input_signature({"x": torch.zeros(2, 3), "n": 5})
    assert input_signature(base) != input_signature((torch.zeros(2, 3), 4))
