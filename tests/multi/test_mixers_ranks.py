"""Rows split over ranks compute what one process computes, whatever layers a `transformers` model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import apply_context_parallel, open_world, split_batch
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError
from plait.models.hf import CausalLM, adapt
from plait.trainer import check_rows
from tests.hf_models import model_types, tiny_model
from tests.multi.ranks import RankPool

pytest.importorskip("transformers")

CASES = ["llama", "gemma3_text", "gpt_oss", "llama4_text", "qwen3_next", "lfm2", "falcon_h1", "mamba2", "deepseek_v4"]
TOKENS = 24


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", model_types("causal-lm") if metafunc.config.option.fresh else CASES)


def many_heads(model_type: str) -> Any:
    """A tiny model whose index has so many heads that no two tokens have a score of zero, whose order is any."""
    model = tiny_model(model_type, "causal-lm", seed=0)
    if not hasattr(model.config, "index_n_heads"):
        return model
    model.config.index_n_heads = 16
    return type(model)(model.config)


def built(model_type: str) -> Any:
    model = many_heads(model_type)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # as large as in a trained model
        for param in model.parameters():
            if param.ndim > 1:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.7 * param.shape[-1] ** -0.5)
    return adapt(model, CausalLM)


def rows(documents: bool) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (2, TOKENS + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if documents:
        begins = torch.rand(2, TOKENS) < 0.2
        batch["document_ids"] = begins.cumsum(1)
        place = torch.arange(TOKENS).expand(2, -1)
        batch["positions"] = place - torch.where(begins, place, 0).cummax(1).values
    return batch


def both_passes(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch).sum
    loss.backward()
    zero = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    return loss.detach(), {
        name: zero[name] if param.grad is None else param.grad for name, param in model.named_parameters()
    }


def difference(rank: int, size: int, model_type: str, kind: Any, batch: dict[str, Tensor]) -> str | float:
    """The largest difference of the loss or a gradient, relative to its largest value; or why that is refused."""
    try:
        loss, gradients = both_passes(built(model_type), batch)
        model = built(model_type)
        apply_context_parallel(model, dist.group.WORLD, kind=kind)  # type: ignore[arg-type]
        found, mine = both_passes(model, split_batch(batch, rank, size, kind=kind))
    except ModelError as error:
        return str(error)
    dist.all_reduce(found)
    for gradient in mine.values():
        dist.all_reduce(gradient)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    errors = [float((found - loss).abs() / loss.abs())]
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-2 * largest)
        errors.append(float((mine[name] - gradient).abs().max()) / scale)
    return max(errors)


@pytest.mark.parametrize(("kind", "documents"), [("ring", True), ("ulysses", False)])
def test_split_rows_compute_as_in_one_process(two_ranks: RankPool, model_type: str, kind: str, documents: bool) -> None:
    for found in two_ranks.run(difference, model_type, kind, rows(documents)):
        if isinstance(found, str):
            assert model_type not in CASES, found
            assert "strategy.layout.cp" in found or "position" in found
        else:
            assert found < 2e-4


class Leaky(nn.Module):
    """A model of one's own with a recurrence over the row that knows neither documents nor ranks."""

    def __init__(self, leaks: bool = True) -> None:
        super().__init__()
        self.embedding, self.head, self.leaks = nn.Embedding(64, 16), nn.Linear(16, 64), leaks
        self.layers = nn.ModuleList([nn.Identity(), nn.Linear(16, 16)])

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, document_ids: Tensor) -> Any:
        from plait import LossTerm

        x = self.layers[0](self.embedding(input_ids))
        before = x.cumsum(1)
        if not self.leaks:
            same = (document_ids[:, :, None] == document_ids[:, None, :]).tril()
            before = same.to(x.dtype) @ x
        x = self.layers[1](before)
        losses = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return LossTerm(losses.sum(), (labels != -100).sum())


def check(rank: int, size: int, leaks: bool, strategy: dict[str, Any]) -> str | None:
    described = parse_sections(seed=1, optim={"type": "SGD", "lr": 0.1}, strategy=strategy).config
    torch.manual_seed(0)
    engine = prepare_native(Preparation(described, open_world(described), model=Leaky(leaks)))
    batch = rows(documents=True)
    batch["input_ids"] %= 64
    batch["labels"] %= 64
    before = torch.get_rng_state()
    try:
        check_rows(engine, batch)
    except ModelError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), before)
    return None


@pytest.mark.parametrize("strategy", [{}, {"zero": 3}])
def test_a_layer_that_sees_other_documents_is_found(two_ranks: RankPool, strategy: dict[str, Any]) -> None:
    assert two_ranks.run(check, False, strategy) == [None, None]
    for message in two_ranks.run(check, True, strategy):
        assert message is not None
        assert "layers.1 of Leaky" in message
        assert "data.document_mask: false" in message
        assert "train.check_rows: false" in message


def check_split(rank: int, size: int, handled: bool) -> str | None:
    """Check a model whose convolutions gather the row, or (as one that was not found) do not."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
    sections: Any = {"model": {"type": "hf", "config": {"model_type": "lfm2", **sizes, **layers, "pad_token_id": 0}}}
    described = parse_sections(seed=1, optim={"type": "SGD", "lr": 0.1}, strategy={"layout": {"cp": size}}, **sections)
    engine = prepare_native(Preparation(described.config, open_world(described.config)))
    if not handled:
        for module in engine.model.modules():
            if hasattr(module, "plait_context"):
                module.plait_context = None
    torch.manual_seed(1)  # the same weights and row on all ranks
    with torch.no_grad():
        for param in engine.model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.7 * param.shape[-1] ** -0.5)
    try:
        check_rows(engine, rows(documents=False) | {"positions": torch.arange(TOKENS).expand(2, -1)})
    except ModelError as error:
        return str(error)
    return None


def test_a_layer_that_sees_its_rank_only_is_found(two_ranks: RankPool) -> None:
    assert two_ranks.run(check_split, True) == [None, None]
    for message in two_ranks.run(check_split, False):
        assert message is not None
        assert "strategy.layout.cp: 1" in message
