"""Below stage 3, DeepSpeed's scripts find whole weights on every rank between steps, and look at them on one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import plait.frontends.deepspeed as deepspeed
from plait.distributed import is_sharded
from plait.errors import ModelError
from plait.frontends.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.multi.deepspeed_loop import begin, micro_step, pictures
from tests.multi.ranks import RankPool
from tests.refusals import refused

Weights = dict[str, Tensor]

FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "offload": {"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}
LAYOUTS = [(0, "bf16"), (1, "fp32"), (1, "offload"), (2, "bf16"), (2, "offload")]


def config(stage: int, name: str) -> dict[str, Any]:
    more = FORMATS[name]
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
        "zero_optimization": {**more.get("zero_optimization", {}), "stage": stage},
    }


def copied(weights: Weights) -> Weights:
    return {name: value.detach().clone() for name, value in weights.items()}


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def look_alone(rank: int, size: int, job: dict[str, Any], looks: bool, folder: str) -> dict[str, Any]:
    """Rank 0 alone saves, and asks the model; the others go on, and would not answer."""
    engine = begin(deepspeed, job)
    x = pictures(99, 4)[0].to(next(engine.module.parameters()).dtype)
    alone: list[Weights] = []
    losses: list[Tensor] = []
    for index in range(6):
        if looks and rank == 0:
            alone.append(copied(engine.module.state_dict()))
            torch.save(engine.module.state_dict(), f"{folder}/{index}.bin")
            with torch.no_grad():
                assert torch.isfinite(engine.module(x)).all()
                assert torch.isfinite(engine(x)).all()
        losses.append(micro_step(engine, index, rank, size))
    return {"losses": losses, "alone": alone, "last": engine.module_state_dict()}


@pytest.mark.parametrize(("stage", "name"), LAYOUTS)
def test_rank_0_looks_alone_and_changes_nothing(two_ranks: RankPool, tmp_path: Path, stage: int, name: str) -> None:
    job = {"config": config(stage, name)}
    looked = two_ranks.run(look_alone, job, True, str(tmp_path))
    blind = two_ranks.run(look_alone, job, False, str(tmp_path))
    for one, other in zip(looked, blind, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one["losses"], other["losses"], strict=True))
        assert equal(one["last"], other["last"])
    alone = looked[0]["alone"]
    assert equal(alone[0], alone[1])  # within a step nothing changes
    assert equal(alone[2], alone[3])
    assert not equal(alone[1], alone[2])
    saved = torch.load(tmp_path / "5.bin")
    assert equal(saved, alone[5])


def generate_alone(rank: int, size: int) -> list[bool]:
    torch.manual_seed(4)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 50}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=49))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**config(2, "bf16"), "gradient_clipping": 0}
    )
    found = []
    for _ in range(2):
        tokens = torch.randint(50, (4, 8))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        if rank == 0:
            answer = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
            twin = transformers.GPT2LMHeadModel(model.config).bfloat16()
            twin.load_state_dict(model.state_dict())
            expected = twin.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
            found.append(torch.equal(answer, expected))
    return found


def test_rank_0_generates_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(generate_alone) == [[True] * 2, []]


def save_and_load(rank: int, size: int, job: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = begin(deepspeed, job)
    found: dict[str, Any] = {}
    for index in range(4):
        if index == 2:
            engine.save_checkpoint(folder, tag="between")
            found["between"] = copied(engine.module.state_dict()), copied(engine.module_state_dict())
        micro_step(engine, index, rank, size)
        if index == 2:
            engine.save_checkpoint(folder, tag="within")
            found["within"] = copied(engine.module.state_dict()), copied(engine.module_state_dict())
    found["trained"] = copied(engine.module.state_dict()), copied(engine.module_state_dict())
    engine.load_checkpoint(folder, tag="between")
    found["loaded"] = copied(engine.module.state_dict()), copied(engine.module_state_dict())
    engine.module.load_state_dict({name: value.float() + 1 for name, value in found["trained"][0].items()})
    found["given"] = copied(engine.module.state_dict()), copied(engine.module_state_dict())
    return found


@pytest.mark.parametrize(("stage", "name"), LAYOUTS)
def test_wholes_are_those_of_the_checkpoint(two_ranks: RankPool, tmp_path: Path, stage: int, name: str) -> None:
    first, second = two_ranks.run(save_and_load, {"config": config(stage, name)}, str(tmp_path))
    for moment in first:
        seen, gathered = first[moment]
        assert equal(seen, gathered)
        assert equal(second[moment][0], seen)
    assert equal(first["between"][0], first["within"][0])
    assert not equal(first["trained"][0], first["between"][0])
    assert equal(first["loaded"][0], first["between"][0])
    assert not equal(first["given"][0], first["trained"][0])
    # Within a step as between steps, what is saved are the weights that are updated, in fp32.
    between, within = (get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag) for tag in ("between", "within"))
    assert equal(between, within)
    rounded = [not torch.equal(value, value.bfloat16().float()) for value in within.values()]
    assert any(rounded)


def set_one(rank: int, size: int, job: dict[str, Any]) -> list[bool]:
    engine = begin(deepspeed, job)
    param = engine.module.head.weight
    assert not hasattr(param, "ds_id")  # by which scripts tell stage 3
    with deepspeed.zero.GatheredParameters([param], modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                param.fill_(0.5)
    held = deepspeed.utils.safe_get_full_fp32_param(param).clone()
    deepspeed.utils.safe_set_full_fp32_param(param, torch.full_like(held, 0.25))
    shown = param.detach().clone()
    micro_step(engine, 0, rank, size)
    micro_step(engine, 1, rank, size)
    after = deepspeed.utils.safe_get_full_fp32_param(param)
    return [bool((held == 0.5).all()), bool((shown == 0.25).all()), bool(((after - 0.25).abs() < 0.02).all())]


def ask_before_the_step(rank: int, size: int, job: dict[str, Any]) -> list[bool]:
    engine = begin(deepspeed, job)
    micro_step(engine, 0, rank, size)
    before = deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight).clone()
    x, y = pictures(1, 4)
    engine.backward(torch.nn.functional.cross_entropy(engine(x).float(), y))
    param = engine.module.head.weight  # a part of it, where the optimizer has parts
    asked = deepspeed.utils.safe_get_full_fp32_param(param).clone()
    if is_sharded(param):
        with refused(ModelError, "engine.save_16bit_model", "GatheredParameters"):
            engine.module.state_dict()
    engine.step()
    shown, gathered = engine.module.state_dict(), engine.module_state_dict()
    return [torch.equal(before, asked), rank > 0 or equal(copied(shown), gathered)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_known_between_the_backward_pass_and_the_step(two_ranks: RankPool, stage: int) -> None:
    assert two_ranks.run(ask_before_the_step, {"config": config(stage, "fp32")}) == [[True] * 2] * 2


@pytest.mark.parametrize(("stage", "name"), LAYOUTS)
def test_what_a_rank_sets_stays(two_ranks: RankPool, stage: int, name: str) -> None:
    assert two_ranks.run(set_one, {"config": config(stage, name)}) == [[True] * 3] * 2
