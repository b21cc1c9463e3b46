"""The JSON files of a proof: the `ProofJob` that a run gets, and the `ProofTrace` that it writes. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plait.monitor import plain_json

TRACE = "trace.json"
"""The file with a run's `ProofTrace`, in its folder."""
PERTURBED = "perturbed"
"""The folder of the reference's second run, in the folder of the first."""


class Deviation(NamedTuple):
    """The deviation of one tensor from the reference's."""

    value: float
    """Norm of the difference relative to the reference's norm; infinite where they cannot be compared."""
    stored: float
    """The effect of one rounding to the tensor's own dtype, relative to the same norm."""
    problem: str = ""
    """Why they cannot be compared."""


@dataclass(frozen=True, slots=True)
class ProofJob:
    """What one run of a proof trains, and where it writes."""

    config: dict[str, Any]
    folder: str
    """The folder that it writes to."""
    steps: int
    perturbation: float = 0.0
    """If not 0, run the reference again with weights perturbed by up to this fraction of themselves."""
    against: str | None = None
    """The reference's folder; absent for the reference itself."""

    def write(self, path: Path) -> None:
        """Write the job for the processes of the run."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProofJob:
        """Return the job that `write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(slots=True)
class ProofTrace:
    """The measurements of a run, by step."""

    device: str = ""
    versions: str = ""
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The tensors after the last step, in the order of the model."""
    uncompared: list[str] = field(default_factory=list)
    """Running statistics, which each rank computes over its own samples."""
    deviations: list[dict[str, Deviation]] = field(default_factory=list)
    """Name → deviation from the reference, at the start and after each step; empty for the reference itself."""
    drops: list[str] = field(default_factory=list)
    """Modules whose dropout was turned off."""
    random: bool = False
    """Whether the model used random numbers nevertheless."""
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    """The checks with dropout turned on: name, whether it holds, and a sentence."""

    def write(self, path: Path) -> None:
        """Write the trace as JSON, with NaN and infinities as strings."""
        path.write_text(json.dumps(plain_json(asdict(self))), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProofTrace:
        """Return the trace that `write` wrote."""
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in ("loss", "grad_norm", "targets"):
            content[key] = [float(value) for value in content[key]]
        content["deviations"] = [
            {name: Deviation(float(value), float(stored), problem) for name, (value, stored, problem) in step.items()}
            for step in content["deviations"]
        ]
        content["checks"] = [tuple(check) for check in content["checks"]]
        return cls(**content)
