"""Which share of the copies between host and GPU ran while the GPU computed, from a profiler's trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def overlap(step: Callable[[Any, Any], Any], batches: list[Any], path: Path) -> dict[str, float]:
    """Shares of the copies each way that ran while a kernel did, in two steps; the trace goes to `path`."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for batch in batches[:2]:
            step(*batch)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if "dur" in each]
    spans = {kind: [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == kind] for kind in ("kernel",)}
    busy = _union(spans["kernel"])
    found = {}
    for word in ("DtoH", "HtoD"):
        copies = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "gpu_memcpy" and word in e["name"]]
        total = sum(end - begin for begin, end in copies)
        found[word] = round(sum(_common(copy, busy) for copy in copies) / total, 3) if total else 0.0
        found[f"{word}_ms"] = round(total / 2e3, 1)
    return found


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _common(span: tuple[float, float], busy: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in busy)
