"""What every section of a run description has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, so nothing below can change it; closed, so a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, populate_by_name=True)
