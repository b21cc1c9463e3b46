"""Number formats of a run."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch

from plait.config import parse_sections
from plait.precision import cast_floats, make_policy

Pair = namedtuple("Pair", ["image", "label"])


def policy(section: Any) -> Any:
    return make_policy(parse_sections(precision=section).config.precision)


@pytest.mark.parametrize(
    ("word", "dtype", "mixed"),
    [
        ("fp32", torch.float32, False),
        ("tf32", torch.float32, False),
        ("bf16", torch.bfloat16, True),
        ("fp16", torch.float16, True),
    ],
)
def test_a_word_names_the_compute_format(word: str, dtype: torch.dtype, mixed: bool) -> None:
    found = policy(word)
    assert (found.compute, found.mixed, found.tf32) == (dtype, mixed, word == "tf32")
    assert (found.reduce, found.master) == (torch.float32, True)


def test_every_format_can_be_set() -> None:
    found = policy({"compute": "bf16", "reduce": "bf16", "master": False, "autocast": False, "cast_inputs": False})
    assert (found.compute, found.reduce) == (torch.bfloat16, torch.bfloat16)
    assert (found.master, found.autocast, found.cast_inputs) == (False, False, False)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ({"compute": "bf16", "autocast": False}, torch.float32),
    ],
)
def test_a_forward_pass_runs_under_autocast_only_in_a_smaller_format(section: Any, expected: torch.dtype) -> None:
    with policy(section).context(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == expected


def test_floats_are_cast_wherever_they_are_and_nothing_else_is() -> None:
    ids, mask = torch.arange(3), torch.tensor([True, False])
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(2, dtype=torch.float64), ids],
        "c": (mask, "text", None, 1.5),
        "d": Pair(torch.zeros(1), ids),
    }
    found = cast_floats(batch, torch.bfloat16)
    assert found["a"].dtype == found["b"][0].dtype == found["d"].image.dtype == torch.bfloat16
    assert found["b"][1] is ids
    assert found["c"] == (mask, "text", None, 1.5)
    assert isinstance(found["d"], Pair)
    assert found["d"].label is ids
    assert batch["a"].dtype == torch.float32  # the caller's own batch is left alone


def test_any_mapping_is_looked_into() -> None:
    # What a tokenizer of `transformers` returns is no `dict`.
    found = cast_floats(UserDict(x=torch.ones(1)), torch.float16)
    assert found["x"].dtype == torch.float16


def test_a_tensor_alone_is_cast_and_one_in_the_right_format_is_not_copied() -> None:
    right = torch.ones(2, dtype=torch.bfloat16)
    assert cast_floats(torch.ones(2), torch.bfloat16).dtype == torch.bfloat16
    assert cast_floats(right, torch.bfloat16) is right
