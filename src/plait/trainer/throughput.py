"""Speed of a run: averages per log interval, tokens per second, model FLOPs utilization (MFU), remaining time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from plait.data import MicroBatch
from plait.engine import StepResult

# Dense bf16 peak in TFLOP/s by a part of the device's name, most specific first.
_PEAKS = (
    ("B200", 2250.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("4090", 165.0),
    ("V100", 125.0),
)


def peak_flops(device: torch.device) -> float | None:
    """Return the dense 16-bit peak of a device in FLOP/s; None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for model, tflops in _PEAKS if model in name), None)


def memory_mib(device: torch.device) -> float:
    """Return the peak of allocated GPU memory so far, in MiB; on CPU, the resident memory of this process now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return float(psutil.Process().memory_info().rss) / 2**20


def count_tokens(batch: MicroBatch) -> int:
    """Return the number of tokens of a micro-batch; 0 if it has no `input_ids`."""
    if not batch.samples or not isinstance(batch.inputs, Mapping):
        return 0
    ids = batch.inputs.get("input_ids")
    return ids.numel() if isinstance(ids, Tensor) else 0


class Meter:
    """Averages over the steps since the last `read`.

    Adding a step does not wait for the device: the loss and the gradient norm of a step, which may still be running on
    the GPU, are read when the next step is added, or by `read`.
    """

    def __init__(self) -> None:
        self._latest: StepResult | None = None
        self._skipped = 0
        self._reset()

    def _reset(self) -> None:
        self._steps = 0
        self._finite = 0
        self._loss = self._norm = self._data = self._busy = 0.0
        self._tokens = self._samples = 0

    def add(self, result: StepResult, micro_batches: Sequence[MicroBatch], data_time: float, step_time: float) -> None:
        """Add one step; the times are in seconds: `data_time` to load its data, `step_time` for the step itself."""
        self._look()
        self._latest = result
        self._steps += 1
        self._data += data_time
        self._busy += step_time
        for batch in micro_batches:
            self._samples += batch.samples
            self._tokens += count_tokens(batch)

    def _look(self) -> None:
        result, self._latest = self._latest, None
        if result is None:
            return
        if result.skipped:
            self._skipped += 1
        else:
            self._finite += 1
            self._loss += result.loss
            self._norm += result.grad_norm

    def read(self, *, ranks: int, flops_per_token: float | None, peak: float | None) -> dict[str, Any]:
        """Return the averages since the last call by the names of a log line, and start new ones.

        `ranks`: how many data-parallel ranks there are; `peak`: FLOP/s of one device, for the MFU.
        """
        self._look()
        steps, seconds = max(self._steps, 1), self._data + self._busy
        finite = self._finite
        data: dict[str, Any] = {
            "loss": self._loss / finite if finite else float("nan"),
            "grad_norm": self._norm / finite if finite else float("nan"),
            "time": seconds / steps,
            "data_time": self._data / steps,
            "samples_per_s": self._samples * ranks / seconds if seconds else 0.0,
            "skipped": self._skipped,
        }
        if self._tokens and seconds:
            data["tokens_per_s"] = self._tokens * ranks / seconds
            if flops_per_token and peak:
                data["mfu"] = self._tokens * flops_per_token / seconds / peak
        self._reset()
        return data


class RemainingTime:
    """Estimates when the run will end, from its speed so far."""

    def __init__(self, done: int) -> None:
        self._start = time.perf_counter()
        self._from = done

    def eta(self, done: int, total: int | None) -> float | None:
        """Return the remaining seconds, after `done` of `total` steps; None if that is not known yet."""
        if total is None or done <= self._from:
            return None
        return (time.perf_counter() - self._start) / (done - self._from) * (total - done)
