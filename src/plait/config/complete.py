"""Whether a run description has all that a run needs, found out before a process starts."""

from __future__ import annotations

from dataclasses import replace

from plait.config.draft import origin_of
from plait.config.engine import check_library
from plait.config.parse import Parsed
from plait.config.paths import missing_paths
from plait.config.rules import check
from plait.errors import ConfigError, Problem


def check_complete(parsed: Parsed, *, require_length: bool) -> None:
    """Refuse a run that breaks a rule, lacks its model or its data, or names files or an engine that are not there."""
    config = parsed.config
    check(config, has_val=config.val_data is not None, require_length=require_length, origins=parsed.origins)
    absent = [role for role in ("model", "data") if getattr(config, role) is None]
    problems = [Problem(role, "there is none", f"Add a section `{role}` with a `type`.") for role in absent]
    problems += [replace(each, origin=origin_of(each.path, parsed.origins)) for each in missing_paths(config)]
    if problems:
        raise ConfigError(problems)
    check_library(config.strategy.engine)
