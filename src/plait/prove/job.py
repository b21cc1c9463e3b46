"""What a process of a proof is told, and what it has to say. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from plait.monitor import plain_json

TRACE = "trace.json"
"""The file with a run's `Trace`, in its folder."""
NUDGED = "nudged"
"""The folder of the reference's second run, inside its own."""


class Deviation(NamedTuple):
    """How far one tensor is from the reference's."""

    value: float
    """Norm of the difference, as a part of the reference's norm; infinite where they cannot be compared."""
    stored: float
    """What one rounding to the tensor's own format is, as a part of the same."""
    problem: str = ""
    """Why they cannot be compared."""


@dataclass(frozen=True, slots=True)
class ProofJob:
    """One run of a proof."""

    config: dict[str, Any]
    folder: str
    """Where it writes; nobody else does."""
    steps: int
    nudge: float = 0.0
    """A reference runs again with weights off by up to this part of themselves."""
    against: str | None = None
    """The reference's folder; absent for the reference itself."""

    def write(self, path: Path) -> None:
        """Leave it for the processes that are about to start."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProofJob:
        """What `write` left."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(slots=True)
class ProofTrace:
    """What a run did, step by step."""

    device: str = ""
    versions: str = ""
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The tensors after the last step, in the order of the model."""
    uncompared: list[str] = field(default_factory=list)
    """Running statistics, which each rank gathers over its own samples."""
    deviations: list[dict[str, Deviation]] = field(default_factory=list)
    """From the reference, for the start and each step; empty for the reference itself."""
    drops: list[str] = field(default_factory=list)
    """Modules whose dropout was turned off."""
    random: bool = False
    """Whether the model drew random numbers all the same."""
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    """What was found about dropout with it turned on: name, whether it is right, and a sentence."""

    def write(self, path: Path) -> None:
        """As JSON; a number that JSON does not know becomes text."""
        path.write_text(json.dumps(plain_json(asdict(self))), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProofTrace:
        """What `write` left."""
        content = json.loads(path.read_text(encoding="utf-8"))
        for key in ("loss", "grad_norm", "targets"):
            content[key] = [float(value) for value in content[key]]
        content["deviations"] = [
            {name: Deviation(float(value), float(stored), problem) for name, (value, stored, problem) in step.items()}
            for step in content["deviations"]
        ]
        content["checks"] = [tuple(check) for check in content["checks"]]
        return cls(**content)
