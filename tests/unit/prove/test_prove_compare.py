"""How far two tensors, and two states, are apart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.refusals import missing
from torch import Tensor

from plait.checkpoint import CheckpointFolder, write_single_process
from plait.prove.compare import LARGE, TRIMMED, SavedState, compare, deviation


def test_a_deviation_is_a_part_of_the_references_norm() -> None:
    expected = torch.randn(40, 30)
    found = expected + torch.randn(40, 30) * 1e-3
    part = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert deviation(expected, found).value == pytest.approx(part)


def test_equal_tensors_do_not_deviate_and_one_entry_off_shows() -> None:
    expected = torch.randn(40, 30)
    found = expected.clone()
    assert deviation(expected, found).value == 0
    found[7, 3] += 1.0
    assert deviation(expected, found).value > 1e-3


def test_parameters_are_compared_by_how_far_they_moved() -> None:
    start, perturbation, move = torch.randn(500), torch.randn(500) * 1e-2, torch.randn(500) * 1e-4
    gap = torch.randn(500) * 1e-6
    apart = deviation(start + move, start + perturbation + move + gap, (start, start + perturbation))
    assert apart.value == pytest.approx(float(gap.norm() / move.norm()), rel=0.3)
    assert apart.stored == pytest.approx(2**-23 * float(start.norm() / move.norm()), rel=1e-2)


def test_a_few_entries_that_rounding_decides_are_left_out_of_large_parameters_only() -> None:
    for size, seen in ((LARGE, False), (LARGE - 1, True)):
        start, end = torch.zeros(size), torch.ones(size)
        found = end.clone()
        found[:TRIMMED] = -1
        assert (deviation(end, found, (start, start)).value > 0) is seen
        assert deviation(end, found).value > 0
        found[: TRIMMED + 1] = -1
        assert deviation(end, found, (start, start)).value > 0


def test_what_never_moves_is_measured_by_its_own_size() -> None:
    frozen = torch.randn(9)
    assert deviation(frozen, frozen * 1.5, (frozen, frozen)).value == pytest.approx(0.5)


def test_a_number_that_is_not_finite_in_one_run_alone_is_infinitely_far_off() -> None:
    expected = torch.randn(5)
    found = expected.clone()
    found[0] = math.nan
    assert deviation(expected, found).value == math.inf
    assert deviation(found, found).value == 0


def test_whole_numbers_deviate_by_the_share_that_differs() -> None:
    assert deviation(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])).value == 0.25


def write(folder: Path, step: int, tensors: dict[str, Tensor]) -> Path:
    path = CheckpointFolder(folder).path_of(step)
    folder.mkdir(exist_ok=True)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    write_single_process(path, shapes, tensors.__getitem__, {}, step=step)
    return path


def test_states_are_compared_by_name_and_a_tensor_of_one_run_alone_is_said(tmp_path: Path) -> None:
    weight, momentum = torch.randn(4, 4), torch.randn(4, 4)
    start = {"model.w": weight}
    ours = {"model.w": weight + 1, "optim.w.m": momentum, "optim.w.v": momentum, "optim.w.lost": momentum}
    theirs = {"model.w": weight + 1, "optim.w.m": momentum * 2, "optim.w.v": momentum[:2], "optim.w.new": momentum}
    expected = SavedState(write(tmp_path / "a", 0, start), write(tmp_path / "a", 1, ours))
    found = SavedState(write(tmp_path / "b", 0, start), write(tmp_path / "b", 1, theirs))
    apart = compare(expected, found, list(ours), step=1)
    assert list(apart) == ["model.w", "optim.w.m", "optim.w.v", "optim.w.lost", "optim.w.new"]
    assert apart["model.w"].value == 0
    assert apart["optim.w.m"].value == pytest.approx(1)
    assert "(4, 4)" in apart["optim.w.v"].problem
    lost, new = (apart[f"optim.w.{name}"].problem for name in ("lost", "new"))
    assert not missing(lost, "reference")
    assert not missing(new, "candidate")
    assert lost != new
