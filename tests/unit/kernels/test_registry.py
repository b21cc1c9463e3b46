"""The registry decides which implementation computes an operation."""

from __future__ import annotations

import pytest
import torch

from plait.kernels import registry
from plait.kernels.registry import OPERATIONS, implementation

X = torch.ones(2)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Claim that kernels run on every device; returns the compute capabilities that were asked for."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(registry, "has_kernels", lambda _, capability: asked.append(capability) is None)
    return asked


def test_every_operation_has_torch_and_a_reason() -> None:
    for name, row in OPERATIONS.items():
        assert set(row.implementations) <= {"torch", "plait"}, name
        assert "torch" in row.implementations, name
        assert row.why, name


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_first_implementation_is_taken_where_there_are_kernels(name: str, kernels: list[tuple[int, int]]) -> None:
    row = OPERATIONS[name]
    assert implementation(name, X) == row.implementations[0]
    assert kernels == ([row.capability] if "plait" in row.implementations else [])
    wide = implementation(name, X.double())
    assert wide == ("torch" if torch.float64 in row.excluded else row.implementations[0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_is_taken_where_there_are_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "has_kernels", lambda _, __: False)
    assert implementation(name, X) == "torch"
