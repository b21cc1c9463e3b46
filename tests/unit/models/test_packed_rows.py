"""Documents that share a row compute what each computes alone, whatever layers a `transformers` model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf_models import model_types, tiny_model
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import HFConfig, RecomputeConfig, WrapConfig
from plait.distributed import apply_recompute, find_wrap_units, prepare_mixers, with_documents
from plait.errors import ModelError
from plait.models.hf import CausalLM, adapt, build_hf_model

pytest.importorskip("transformers")

WINDOWS = ["gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "cohere2", "olmo3", "exaone4", "mistral", "llama4_text"]
MIXERS = [
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "minimax",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "falcon_h1",
]
MIXERS += [
    "nemotron_h",
    "jamba",
    "kimi_linear",
    "glm_moe_dsa",
    "deepseek_v4",
    "mamba2",
    "rwkv",
    "recurrent_gemma",
    "hy_v4",
]
LISTED = ["llama", "roberta", *WINDOWS, *MIXERS]
LENGTHS = [[6, 9, 3, 1, 5], [13, 2, 9]]
"""Rows of 24 tokens: longer than any window, documents longer and shorter."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        every = model_types("causal-lm") if metafunc.config.option.fresh else LISTED
        metafunc.parametrize("model_type", every)


def many_heads(model_type: str) -> Any:
    """A tiny model whose index has so many heads that no two tokens have a score of zero, whose order is any."""
    model = tiny_model(model_type, "causal-lm", seed=0)
    if not hasattr(model.config, "index_n_heads"):
        return model
    model.config.index_n_heads = 16
    return type(model)(model.config)


def built(model_type: str) -> Any:
    model = many_heads(model_type)
    with torch.no_grad():  # as large as in a trained model, so that what leaks is seen
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.7 * param.shape[-1] ** -0.5)
    return adapt(model, CausalLM).eval()


def packed() -> dict[str, Tensor]:
    """Rows of several documents each, as the data section makes them."""
    rows: dict[str, list[Any]] = {"document_ids": [], "positions": []}
    for lengths in LENGTHS:
        rows["document_ids"].append([number for number, length in enumerate(lengths) for _ in range(length)])
        rows["positions"].append([place for length in lengths for place in range(length)])
    ids = torch.randint(3, 90, (2, 24))
    return {"input_ids": ids} | {key: torch.tensor(value) for key, value in rows.items()}


def logits_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    rows = []
    for ids, positions, lengths in zip(batch["input_ids"], batch["positions"], LENGTHS, strict=True):
        parts = zip(ids.split(lengths), positions.split(lengths), strict=True)
        rows.append(torch.cat([model(x[None], positions=place[None])[0] for x, place in parts]))
    return torch.stack(rows)


def test_documents_of_a_row_compute_as_alone(model_type: str) -> None:
    listed = model_type in LISTED
    try:
        model, batch = built(model_type), packed()
        with torch.no_grad():
            model(batch["input_ids"])
            expected = logits_alone(model, batch)
    except Exception as error:
        if listed:
            raise
        pytest.skip(f"no tiny model that takes such rows: {error}")
    if getattr(model.config, "attn_type", None) == "bi":
        pytest.skip("refused where it is built")
    with torch.no_grad():
        try:
            together = model(**batch)
        except ModelError:
            if listed:
                raise
            pytest.skip("refused")
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_windows_are_combined_with_documents_by_any_attention(
    implementation: str, request: pytest.FixtureRequest
) -> None:
    if implementation == "flex_attention" and not request.config.option.fresh:
        pytest.skip("is compiled, which takes long")
    model, batch = built("gemma3_text"), packed()
    with torch.no_grad():
        expected = logits_alone(model, batch)
        model.set_attn_implementation(implementation)
        together = model(**batch)
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_documents_are_kept_for_a_recomputation() -> None:
    """Also if the model has been called with other rows since."""
    model, batch = built("qwen3_next"), packed()
    gradients = []
    for recompute in (False, True):
        if recompute:
            apply_recompute(find_wrap_units(model, WrapConfig()), RecomputeConfig(mode="full"))
        model.zero_grad()
        logits = model(**batch)
        model(batch["input_ids"])
        logits.square().mean().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7)


class Recurrence(nn.Module):
    """A running sum, of what has no axis of the tokens where `odd`."""

    def forward(self, x: Tensor, odd: Tensor | None = None, cache: Any = None) -> Tensor:
        return x.cumsum(1) + (0.0 if odd is None else odd.sum())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Recurrence()

    def forward(self, x: Tensor, odd: Tensor | None = None, cache: Any = None) -> Tensor:
        return self.mixer(x, odd)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x: Tensor, odd: Tensor | None = None) -> Tensor:
        return self.layers[0](x, odd)


def test_a_layer_that_cannot_be_called_by_document_is_named() -> None:
    model, ids = Stack(), torch.tensor([[0, 0, 1, 1, 1, 2]])
    assert list(prepare_mixers(model)) == ["layers.0.mixer"]
    x = torch.ones(1, 6, 2)
    assert model(x, **with_documents({}, ids))[0, :, 0].tolist() == [1, 2, 1, 2, 3, 1]
    assert model(x)[0, :, 0].tolist() == [1, 2, 3, 4, 5, 6]
    with refused(ModelError, "layers.0.mixer", "Recurrence", "(7,)", "data.document_mask: false"):
        model(x, torch.zeros(7), **with_documents({}, ids))
    with refused(ModelError, "layers.0.mixer", "(1, 5)", "data.document_mask: false"):
        model(x, **with_documents({}, ids[:, :5]))


def test_a_model_that_sees_what_it_is_to_predict_is_refused() -> None:
    config = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64, "vocab_size": 99}
    with refused(ModelError, "model.config.attn_type", "'bi'", "causal-lm"):
        build_hf_model(HFConfig(config=config, task="causal-lm"))
