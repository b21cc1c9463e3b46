from __future__ import annotations

import pytest
import torch

from plait.models import build_model, preset

FAMILIES = [("gpt", "tiny"), ("llama", "tiny"), ("hf", "tiny-llama"), ("hf", "tiny-gpt2")]


def _packed(lengths):
    ids = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return ids[None], positions[None]


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_documents_packed_into_a_row_are_judged_as_if_alone(family, name):
    model = build_model(preset(family, name)).eval()
    lengths = (11, 1, 20)
    tokens = torch.randint(256, (1, sum(lengths)))
    document_ids, positions = _packed(lengths)
    packed = model(tokens, positions=positions, document_ids=document_ids)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_one_document_equals_none_named(family, name):
    model = build_model(preset(family, name)).eval()
    tokens = torch.randint(256, (2, 17))
    named = model(tokens, document_ids=torch.full_like(tokens, 3))
    torch.testing.assert_close(named, model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_no_token_sees_the_future(family, name):
    model = build_model(preset(family, name)).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[:, 10:] = torch.randint(256, (1, 6))
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
