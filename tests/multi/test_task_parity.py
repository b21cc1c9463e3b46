"""Tasks beside the next token: strategies compute what one process does, and that is what `transformers` computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.config import HFConfig
from plait.errors import ModelError
from plait.models import LossTerm, build_model
from tests.multi.parity import assert_same, run_steps
from tests.multi.ranks import RankPool
from tests.refusals import refused

pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
BERT = {
    "model_type": "bert",
    **SIZES,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {"model_type": "vit", **SIZES, "image_size": 16, "patch_size": 4, "encoder_stride": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "masked-lm": BERT,
    "sequence-classification": {**BERT, "num_labels": 3},
    "seq2seq-lm": {
        "model_type": "t5",
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 40,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "image-classification": {**VIT, "num_labels": 3},
    "masked-image-modeling": VIT,
    "speech-seq2seq": {
        "model_type": "whisper",
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "vocab_size": 40,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 12,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
    },
    "contrastive-image-text": {
        "model_type": "clip",
        "projection_dim": 8,
        "text_config": {**SIZES, "vocab_size": 40, "max_position_embeddings": 12, "eos_token_id": 2},
        "vision_config": {**SIZES, "image_size": 16, "patch_size": 4},
    },
}
NOISE = ("k_proj.bias", "key.bias")
"""Softmax does not see a bias of all keys, so its gradient is zero but for rounding."""


def micro_batch(task: str, samples: int, dice: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (samples, 12), generator=dice)
    mask = (torch.arange(12) < torch.randint(4, 13, (samples, 1), generator=dice)).long()
    hidden = torch.rand(samples, 12, generator=dice) < 0.2 + 0.6 * torch.rand((), generator=dice)
    labels = ids.masked_fill(~hidden, -100)
    image = torch.randn(samples, 3, 16, 16, generator=dice)
    classes = torch.randint(0, 3, (samples,), generator=dice)
    text = {"input_ids": ids, "attention_mask": mask}
    return {
        "masked-lm": {**text, "labels": labels},
        "sequence-classification": {**text, "labels": classes},
        "seq2seq-lm": {**text, "labels": labels},
        "image-classification": {"image": image, "label": classes},
        "masked-image-modeling": {
            "image": image,
            "bool_masked_pos": torch.rand(samples, 16, generator=dice) < 0.3 + 0.4 * torch.rand((), generator=dice),
        },
        "speech-seq2seq": {"input_features": torch.randn(samples, 8, 20, generator=dice), "labels": labels},
        "contrastive-image-text": {**text, "pixel_values": image},
    }[task]


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.mark.parametrize("task", CONFIGS)
def test_strategies_compute_what_one_process_does(
    two_ranks: RankPool, task: str, request: pytest.FixtureRequest
) -> None:
    dice = torch.Generator().manual_seed(11)
    steps = [[micro_batch(task, 2, dice) for _ in range(4)] for _ in range(2)]
    whole = steps
    if task == "contrastive-image-text":  # all ranks' samples of a micro-batch are compared with one another
        whole = [[joined(step[at : at + 2]) for at in (0, 2)] for step in steps]
    sections = {"model": {"type": "hf", "task": task, "config": CONFIGS[task]}}
    expected = run_steps(0, 1, sections, whole)
    noise = next((name for name in NOISE if any(name in tensor for tensor in expected.tensors)), "")
    every = request.config.option.fresh or task == "contrastive-image-text"
    for zero in (0, 1, 2, 3) if every else (3,):
        for found in two_ranks.run(run_steps, {**sections, "strategy": {"zero": zero}}, steps):
            assert_same(found, expected, tolerance=1e-4, noise=noise)


TRANSFORMERS_NAMES = {"image": "pixel_values", "label": "labels"}


@pytest.mark.parametrize("task", CONFIGS)
def test_the_loss_of_one_micro_batch_is_that_of_transformers(task: str) -> None:
    torch.manual_seed(1)
    model: Any = build_model(HFConfig(config=CONFIGS[task], task=task)).eval()  # type: ignore[arg-type]
    batch = micro_batch(task, 3, torch.Generator().manual_seed(2))
    loss = model(**batch)["loss"]
    assert isinstance(loss, LossTerm)
    given = {TRANSFORMERS_NAMES.get(key, key): value for key, value in batch.items()}
    if task == "contrastive-image-text":
        given["return_loss"] = True  # type: ignore[assignment]
    expected = model(**given, return_dict=True).loss
    torch.testing.assert_close(loss.mean(), expected, rtol=1e-4, atol=1e-5)


def test_numbers_and_several_classes_have_their_own_losses() -> None:
    batch = micro_batch("sequence-classification", 3, torch.Generator().manual_seed(2))
    for outputs, labels in ((1, torch.randn(3)), (4, torch.tensor([[1.0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]))):
        model: Any = build_model(HFConfig(config=BERT, task="sequence-classification", num_labels=outputs)).eval()
        given = {**batch, "labels": labels}
        expected = model(**given, return_dict=True).loss
        torch.testing.assert_close(model(**given)["loss"].mean(), expected, rtol=1e-4, atol=1e-5)


def test_a_decoder_without_a_start_token_names_the_key() -> None:
    config = {key: value for key, value in CONFIGS["seq2seq-lm"].items() if key != "decoder_start_token_id"}
    model: Any = build_model(HFConfig(config=config, task="seq2seq-lm"))
    with refused(ModelError, "model.config.decoder_start_token_id"):
        model(**micro_batch("seq2seq-lm", 2, torch.Generator().manual_seed(2)))


def test_the_last_token_of_labels_is_not_an_input_of_the_decoder() -> None:
    """Text infilling by BART: decoder inputs are the labels, behind the start token."""
    small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    config = {"model_type": "bart", "d_model": 8, "vocab_size": 40, "max_position_embeddings": 16, **small, **heads}
    model: Any = build_model(HFConfig(config=config, task="seq2seq-lm")).eval()
    batch = micro_batch("seq2seq-lm", 2, torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        model(**batch)["loss"].mean(), model(**batch, return_dict=True).loss, rtol=1e-4, atol=1e-5
    )
