"""Promise 1 for the models that people train."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.data import MicroBatch
from plait.errors import ModelError
from plait.models import build_model
from plait.models.hf import PRESETS
from tests.multi.parity import assert_same, run_steps, token_batches
from tests.multi.ranks import RankPool
from tests.refusals import refused

STAGES: dict[str, dict[str, Any]] = {"ddp": {}, "zero1": {"zero": 1}, "zero2": {"zero": 2}, "zero3": {"zero": 3}}


def compare(pool: RankPool, strategies: list[dict[str, Any]], steps: Any, tolerance: float, **sections: Any) -> None:
    model, noise = sections.pop("build", None), sections.pop("noise", "")
    expected = run_steps(0, 1, sections, steps, model)
    for strategy in strategies:
        for found in pool.run(run_steps, {**sections, "strategy": strategy}, steps, model):
            assert_same(found, expected, tolerance=tolerance, noise=noise)


@pytest.mark.parametrize("name", PRESETS)
def test_unedited_transformers_models(two_ranks: RankPool, name: str) -> None:
    pytest.importorskip("transformers")
    # GPT-2's preset has dropout, which differs by rank on purpose.
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if name == "tiny-gpt2" else {}
    model = {"type": "hf", "config": {**PRESETS[name]["config"], **quiet}}
    compare(two_ranks, list(STAGES.values()), token_batches(5, 4)[:2], 1e-4, model=model)


def with_a_cache(kind: str) -> nn.Module:
    """A `transformers` model that fills a cache of keys and values unless it is told not to."""
    import transformers

    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 61}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**PRESETS["tiny-llama"]["config"]))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_layers_that_are_computed_again_find_no_cache(two_ranks: RankPool, kind: str, recompute: str) -> None:
    pytest.importorskip("transformers")
    padded = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([0]), 0)
    steps = [[batch | {"attention_mask": padded} for batch in step] for step in token_batches(9, 2)[:2]]
    strategies = [{"zero": zero, "recompute": recompute} for zero in (0, 3)]
    compare(two_ranks, strategies, steps, 1e-4, build=partial(with_a_cache, kind))


def test_a_cache_that_was_given_is_not_left_out_in_silence() -> None:
    transformers = pytest.importorskip("transformers")
    batch = token_batches(9, 1)[0][0] | {"past_key_values": transformers.DynamicCache()}
    with refused(ModelError, "past_key_values", "strategy.recompute: none"):
        run_steps(0, 1, {"strategy": {"recompute": "full"}}, [[batch]], partial(with_a_cache, "llama"))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_without_dropout(two_ranks: RankPool, tied: bool) -> None:
    # Softmax does not see a bias of all keys, so its gradient is zero but for rounding.
    model = {"type": "gpt", "vocab_size": 61, "dim": 16, "layers": 2, "heads": 2, "seq_len": 12, "tie_embeddings": tied}
    compare(two_ranks, list(STAGES.values()), token_batches(6, 4)[:3], 1e-5, model=model, noise="k.bias")


def images(seed: int, micro_batches: int, steps: int = 2) -> list[list[MicroBatch]]:
    generator = torch.Generator().manual_seed(seed)

    def one() -> dict[str, Tensor]:
        image = torch.randn(2, 3, 8, 8, generator=generator)
        return {"image": image, "label": torch.randint(0, 3, (2,), generator=generator)}

    return [[MicroBatch(one(), 2) for _ in range(micro_batches)] for _ in range(steps)]


SGD = {"type": "SGD", "lr": 0.05}
RESNET = {"type": "resnet", "depth": 18, "classes": 3, "stem": "cifar"}


def steady_resnet() -> nn.Module:
    """A ResNet whose norms use their stored statistics.

    Fresh statistics are those of one rank's micro-batch: more ranks are then another model on purpose. With
    the stored ones a ResNet is a function of each image alone, and can be compared.
    """
    from plait.config.model import ResNetConfig

    model = build_model(ResNetConfig(**RESNET))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train = lambda mode=True, module=module: module  # type: ignore[assignment, misc]
            module.training = False
            nn.init.constant_(module.weight, 0.5)
    return model


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_resnet_with_stored_statistics(two_ranks: RankPool, stage: str) -> None:
    compare(two_ranks, [STAGES[stage]], images(7, 2), 1e-4, build=steady_resnet, optim=SGD)


@pytest.mark.parametrize("stage", ["ddp", "zero3"])
def test_resnet_trains_in_16_bits_with_fp32_norms(two_ranks: RankPool, stage: str) -> None:
    sections = {"model": RESNET, "precision": "bf16", "strategy": STAGES[stage], "optim": SGD}
    same = images(8, 1)[0] * 2  # both ranks see the same, so their statistics and gradients are equal too
    alone = run_steps(0, 1, {**sections, "strategy": {}}, [same[:1]] * 2)
    for found in two_ranks.run(run_steps, sections, [same] * 2):
        assert found.tensors["model.bn1.weight"].dtype == torch.float32
        assert found.tensors["model.bn1.running_var"].dtype == torch.float32
        assert found.tensors["model.bn1.num_batches_tracked"] == 2
        assert_same(found, alone, tolerance=3e-2)
