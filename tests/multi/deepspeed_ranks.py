"""Real DeepSpeed, one process a rank: a script that takes a file of jobs and leaves a file with what it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_deepspeed(script: Path, folder: Path, ranks: int, jobs: list[dict[str, Any]], said: str) -> Path:
    """Run the jobs; the file named `said` that rank 0 left. A rank that fails is shown with its last words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    shared = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RENDEZVOUS": f"file://{folder}/rendezvous",
        "WORLD_SIZE": str(ranks),
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder / "jobs.json"), str(folder / said)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [log.read_text()[-3000:] for log, code in zip(logs, codes, strict=True) if code != 0]
    assert not failed, "\n\n".join(failed)
    return folder / said
