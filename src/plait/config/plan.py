"""`plan`: what is known before the start, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from plait.config.base import PathText, Shorthand


def _off(value: Any) -> Any:
    """YAML reads `off` as false."""
    return "off" if value is False else value


class PlanConfig(Shorthand):
    """Every run is planned first: one step on tensors without values, in a few seconds."""

    gate: Annotated[Literal["refuse", "warn", "off"], BeforeValidator(_off)] = "refuse"
    """What happens to a run that will not fit: it does not start, it starts with a warning, or nobody looks."""
    hardware: PathText | None = None
    """A machine that `plait doctor --measure` wrote down, or a preset. Absent: the machine at hand."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A word is the `gate`."""
        return {"gate": value} if value is False or isinstance(value, str) else value
