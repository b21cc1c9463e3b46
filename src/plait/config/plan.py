"""`plan`: what is known before the start, and what follows from it."""

from __future__ import annotations

from typing import Any, Literal

from plait.config.base import PathText, Shorthand


class PlanConfig(Shorthand):
    """Every run is planned first: one step on tensors without values, in a few seconds."""

    gate: Literal["refuse", "warn", "off"] = "refuse"
    """What happens to a run that will not fit: it does not start, it starts with a warning, or nobody looks."""
    hardware: PathText | None = None
    """A machine that `plait doctor --measure` wrote down, or a preset. Absent: the machine at hand."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `gate`; YAML reads `off` as false."""
        if value is False:
            return {"gate": "off"}
        return {"gate": value} if isinstance(value, str) else value
