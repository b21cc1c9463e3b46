"""Models of `transformers` that are built without memory start from the values that their own constructors give."""

from __future__ import annotations

import pytest
import torch
from tests.hf_models import model_types, tiny_model
from torch import nn

from plait.distributed import ConstructionRecord, find_initializer, materialize
from plait.models.hf import HFMethods, adapt

# Constructors that compute a table from other tensors, and then draw all layers again (`post_init`).
TYPES = ["m2m_100", "bart", "t5"]


@pytest.mark.parametrize("model_type", TYPES)
def test_initial_values_are_those_of_transformers(model_type: str) -> None:
    check(model_type, "seq2seq-lm")


def test_initial_values_of_further_architectures(request: pytest.FixtureRequest) -> None:
    if not request.config.option.fresh:
        pytest.skip("with --fresh")
    for model_type in model_types("causal-lm")[::7]:
        try:
            tiny_model(model_type, "causal-lm")
        except Exception:  # the factory has no configuration for it
            continue
        check(model_type, "causal-lm")


def check(model_type: str, kind: str) -> None:
    expected = tiny_model(model_type, kind)
    with torch.device("meta"), ConstructionRecord() as record:
        model = adapt(tiny_model(model_type, kind), HFMethods)
    initializer = find_initializer(model, record)
    if initializer is None:  # it is built on a real device
        return
    materialize.give_storage(model, torch.device("cpu"))
    materialize.initialize(model, initializer, seed=5, device=torch.device("cpu"))
    found = dict(model.named_parameters())
    assert found.keys() == dict(expected.named_parameters()).keys()
    for name, param in expected.named_parameters():
        compare(name, found[name], param)
    buffers = dict(model.named_buffers())
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, equal_nan=True, msg=f"{model_type}: {name}")


def compare(name: str, found: nn.Parameter, expected: nn.Parameter) -> None:
    """Constants are equal; what is drawn has the same spread, as far as so few numbers show it."""
    if float(expected.detach().float().std(correction=0)) == 0.0:
        torch.testing.assert_close(found, expected, msg=name)
    elif expected.numel() >= 256:
        ratio = float(found.detach().float().std() / expected.detach().float().std())
        assert 0.6 < ratio < 1.6, f"{name}: {ratio:.2f}"
