"""Which device a rank computes on, and who speaks between devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.refusals import refused

from plait.distributed import Ranks
from plait.distributed.device import choose_backend, choose_device, device_from_env, may_set_expandable_segments
from plait.errors import WorldError


def rank(place: int, size: int) -> Ranks:
    return Ranks(place, size, place, size, "torchrun")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two CUDA devices, as torch tells it; returns those that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with nothing but its CPU."""
    for module in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(module, "is_available", lambda: False)


def test_cpu_is_cpu_even_beside_gpus(gpus: list[torch.device]) -> None:
    assert choose_device("cpu", rank(0, 1)) == torch.device("cpu")
    assert gpus == []


@pytest.mark.usefixtures("bare")
def test_auto_falls_back_to_the_cpu() -> None:
    assert choose_device("auto", rank(3, 4)) == torch.device("cpu")


def test_auto_takes_the_gpu_of_the_local_rank_and_makes_it_current(gpus: list[torch.device]) -> None:
    assert choose_device("auto", rank(1, 2)) == torch.device("cuda", 1)
    assert gpus == [torch.device("cuda", 1)]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused_with_a_remedy(kind: str) -> None:
    with refused(WorldError, f"device: {kind}", "device: cpu"):
        choose_device(kind, rank(0, 1))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("setting", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused(setting: str) -> None:
    with refused(WorldError, "rank 2", "cuda", "4 processes", "2 devices", "device: cpu"):
        choose_device(setting, rank(2, 4))


def test_mps_is_for_one_rank(monkeypatch: pytest.MonkeyPatch, bare: None) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto", rank(0, 1)) == torch.device("mps")
    assert choose_device("auto", rank(0, 2)) == torch.device("cpu")
    with refused(WorldError, "device: mps", "2 ranks", "device: cpu"):
        choose_device("mps", rank(0, 2))


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("mps", "gloo")])
def test_each_device_has_its_backend(device: str, backend: str) -> None:
    assert choose_backend("auto", torch.device(device)) == backend
    assert choose_backend("gloo", torch.device(device)) == "gloo"


@pytest.mark.skipif(torch.distributed.is_mpi_available(), reason="this torch has MPI")
def test_mpi_needs_a_torch_that_has_it() -> None:
    with refused(WorldError, "backend: mpi", torch.__version__, "backend: auto"):
        choose_backend("mpi", torch.device("cpu"))


@pytest.mark.parametrize("built", [False, True])
def test_nccl_needs_a_torch_that_has_it_and_gpus(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: built)
    with refused(WorldError, "backend: nccl", "cpu" if built else torch.__version__, "backend: auto"):
        choose_backend("nccl", torch.device("cpu"))


def test_segments_grow_unless_the_user_has_settings_of_their_own() -> None:
    assert may_set_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": ""}, "linux")
    assert not may_set_expandable_segments({}, "win32")  # where torch cannot
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert not may_set_expandable_segments({name: "max_split_size_mb:128"}, "linux")


def test_the_allocator_takes_the_setting() -> None:
    look = "from plait.distributed.device import use_expandable_segments; use_expandable_segments()"
    subprocess.run([sys.executable, "-W", "error", "-c", look], check=True)


def test_a_variable_may_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    assert device_from_env("DS_ACCELERATOR") == "auto"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device_from_env("DS_ACCELERATOR") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for kind in ("npu", "cuda"):
        monkeypatch.setenv("DS_ACCELERATOR", kind)
        with pytest.raises(WorldError, match=f"DS_ACCELERATOR={kind}"):
            device_from_env("DS_ACCELERATOR")
