"""One set of settings to try: dotted keys and values, put over the run description."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from plait.config import RunConfig, check, dialect, parse


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings over the user's own; with none, the run as it is written."""

    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A short name that the settings alone decide, so that a later search knows what was tried."""
        text = json.dumps(dict(self.settings), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def overrides(self) -> list[str]:
        """As they would be typed after `plait train run.yaml`."""
        return [f"{key}={written(value)}" for key, value in self.settings.items()]

    def changes(self, run: RunConfig) -> list[str]:
        """The overrides without those that the run says already: what a person has to write."""
        return [f"{key}={written(value)}" for key, value in self.settings.items() if not _says(run, key, value)]

    def applied_to(self, run: RunConfig) -> RunConfig:
        """The run with these settings; a `ConfigError` where that is none.

        Only what was written is written again: a default that another setting leaves without effect is no error.
        """
        changed = parse(run.model_dump(mode="json", exclude_unset=True), self.overrides).config
        check(changed, has_val=changed.val_data is not None, require_length=False)
        return changed


def _says(run: RunConfig, key: str, value: Any) -> bool:
    """Whether a run has this value there; what lies inside lists and free sections is not looked at."""
    found: Any = run
    for part in key.split("."):
        if not isinstance(found, BaseModel) or part not in type(found).model_fields:
            return False
        found = getattr(found, part)
    return bool(found == value)


def written(value: Any) -> str:
    """A value as an override holds it, so that it is read back as it was."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        plain = value and value == value.strip() and value[0] not in "[{\"'" and dialect.scalar(value) == value
        return value if plain else json.dumps(value)
    return repr(value) if isinstance(value, int | float) else json.dumps(value)
