"""The link between host and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.kernels.pinned import copy_gbps


def test_the_fastest_copy_is_the_speed_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([4.0, 1.0, 2.0])  # milliseconds, as a device tells them

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "the stream"

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return next(took)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    source, target = torch.arange(1000, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32)
    assert copy_gbps(target, source, torch.device("cpu"), times=3) == pytest.approx(4000 / 1e-3 / 1e9)
    assert torch.equal(target, source)
