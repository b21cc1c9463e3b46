"""Architectures of `transformers` under tensor and expert parallelism agree with one process: loss and gradients."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from plait.distributed import apply_expert_parallel, apply_tensor_parallel, experts_are_replicated
from plait.distributed.expert_parallel import expert_modules
from plait.errors import PlaitError
from plait.models.common.protocol import LossTerm
from plait.models.hf import CausalLM, adapt
from tests.hf_models import batch, model_types, tiny_model
from tests.multi.ranks import RankPool


@dataclass(frozen=True)
class Case:
    model_type: str
    kind: str = "causal-lm"
    sequence: bool = False
    ep: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        options = [name for name in ("sequence", "ep") if getattr(self, name)]
        return "-".join([self.model_type, self.kind, *options, *self.adapters])


MENDED = [
    Case("apertus"),  # scalars of the activation
    Case("llama4_text", sequence=True),  # a mixture that returns its tokens in one dimension; experts in equal batches
    Case("lfm2"),  # a plan of transformers that names the head only
    Case("opt"),  # no plan of transformers
    Case("mamba2"),  # parameters of the mixer beside its projections
    Case("doge", sequence=True),  # a factor of the residual stream
    Case("longcat_flash", sequence=True),  # two attentions in a list
    Case("deepseek_v2"),  # latent attention
    Case("granite_swa"),  # a parameter per head
    Case("gemma3n_text"),  # a feed-forward whose hidden features depend on each other, though transformers shards it
    Case("inkling2_text"),  # a norm inside of the embedding
    Case("bert", "masked-lm"),  # losses of their own, a head with a tied bias
    Case("t5", "seq2seq-lm"),
    Case("llama", adapters=("q_proj", "o_proj", "down_proj")),
]
"""What was refused, wrong or hardly sharded before."""

MIXTURES = [Case(name, ep=True) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text")]


def make(case: Case, seed: int) -> nn.Module:
    model = tiny_model(case.model_type, case.kind, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    if case.adapters:
        import peft

        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=4, target_modules=list(case.adapters), init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
    if case.sequence:
        adapt(model, CausalLM)
    module: nn.Module = model.train()
    return module


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(model: nn.Module, inputs: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(7)
    output = model(**inputs)
    loss = (output.sum / output.count if isinstance(output, LossTerm) else output.loss) * scale
    loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


def inputs_of(model: Any, case: Case, seed: int) -> dict[str, Tensor]:
    config = model.config
    inputs = batch(model, case.kind, seed)
    if "use_cache" in vars(config):
        config.use_cache = False
    return inputs


def sharded_step(rank: int, size: int, case: Case, seed: int) -> tuple[dict[str, float], float] | str:
    """How far each gradient is from that of one process, and the share of parameters that are sharded; or why not."""
    model = make(case, seed)
    inputs = inputs_of(model, case, seed)
    expected = step(copy.deepcopy(model), inputs)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep" if case.ep else "tp",))
    scale = 1.0
    try:
        if case.ep:
            apply_expert_parallel(model, mesh)
            inputs = {key: value.chunk(size)[rank] for key, value in inputs.items()}
            scale = 1 / size  # every row has the same number of targets
        else:
            alike = experts_are_replicated(model, sequence=case.sequence)
            apply_tensor_parallel(model, mesh, sequence=case.sequence)
            apply_expert_parallel(model, mesh, replicated=alike)
    except PlaitError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    found = step(model, inputs, scale)
    if case.ep:
        spread = {f"{name}.{key}" for name, module in expert_modules(model).items() for key in module._parameters}
        for name, tensor in found.items():
            if name not in spread:
                dist.all_reduce(tensor)
    assert found.keys() == expected.keys()
    errors = {name: error(found[name], tensor) for name, tensor in expected.items()}
    return errors, sharded_share(model)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    scale = float(expected.abs().max())
    difference = float((found - expected).abs().max())
    return difference / scale if scale > 1e-5 else difference


def sharded_share(model: nn.Module) -> float:
    params = list(model.parameters())
    sharded = [p for p in params if isinstance(p, DTensor) and not all(place.is_replicate() for place in p.placements)]
    return sum(p.numel() for p in sharded) / sum(p.numel() for p in params)


def check(pool: RankPool, case: Case, *, least: float = 0.4) -> None:
    seed = random.randrange(1000)
    for found in pool.run(sharded_step, case, seed):
        assert not isinstance(found, str), found
        errors, share = found
        assert {name: error for name, error in errors.items() if error > 1e-3} == {}, seed
        assert share >= least


@pytest.mark.parametrize("case", MENDED, ids=lambda case: case.words)
def test_two_ranks_have_the_loss_and_the_gradients_of_one(two_ranks: RankPool, case: Case) -> None:
    check(two_ranks, case)


@pytest.mark.parametrize("case", MIXTURES, ids=lambda case: case.words)
def test_experts_of_two_ranks_have_the_gradients_of_one(two_ranks: RankPool, case: Case) -> None:
    check(two_ranks, case, least=0.0)


def test_every_causal_architecture_is_equal_or_refused(two_ranks: RankPool, request: pytest.FixtureRequest) -> None:
    if not request.config.option.fresh:
        pytest.skip("all architectures are for --fresh: this is a minute of two cores")
    counts = {"equal": 0, "refused": 0, "not built": 0}
    wrong: dict[str, Any] = {}
    for model_type in model_types("causal-lm"):
        case = Case(model_type)
        try:
            model = make(case, 3)
            step(model, inputs_of(model, case, 3))
        except Exception:  # the tiny configuration is not one that transformers can train
            counts["not built"] += 1
            continue
        found = two_ranks.run(sharded_step, case, 3)[0]
        if isinstance(found, str):
            counts["refused"] += 1
        elif bad := {name: error for name, error in found[0].items() if error > 1e-3}:
            wrong[model_type] = bad
        else:
            counts["equal"] += 1
    assert wrong == {}
    assert counts["equal"] >= 0.85 * (counts["equal"] + counts["refused"]), counts
