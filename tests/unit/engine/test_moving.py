"""Inputs on their way to a device keep their structure."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from plait.engine.forward import InputMover


class Pair(NamedTuple):
    first: Tensor
    second: str


def test_every_tensor_moves_and_nothing_else_changes() -> None:
    given = {"x": [torch.ones(2), (torch.ones(3), 4)], "y": Pair(torch.ones(1), "label"), "z": None}
    found = InputMover(torch.device("meta"))(given)
    assert found["x"][0].is_meta
    assert found["x"][1][0].is_meta
    assert found["x"][1][1] == 4
    assert type(found["y"]) is Pair
    assert (found["y"].first.is_meta, found["y"].second, found["z"]) == (True, "label", None)
