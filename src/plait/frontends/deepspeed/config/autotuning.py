"""`autotuning`: a search of `plait tune`. It is about many runs, and no part of the description of one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.config import show
from plait.errors import ConfigError
from plait.frontends.deepspeed.config.kinds import SECTION
from plait.frontends.deepspeed.config.read import read_config
from plait.frontends.deepspeed.config.work import AUTO, Key, Table, Work

if TYPE_CHECKING:
    from plait.tune import Translated

_SECTIONS = ("arg_mappings", "model_info")


def search(config: str | os.PathLike[str] | Mapping[str, Any], *, nproc: int = 1) -> Translated | None:
    """The search that the `autotuning` section asks for; None where there is no such section."""
    from plait.tune import translate_autotuning

    section = read_config(config).get("autotuning")
    return translate_autotuning(_said(section), nproc=nproc) if isinstance(section, Mapping) else None


def _said(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section without what it leaves open."""
    return {name: value for name, value in section.items() if not _is_open(value)}


def _is_open(value: Any) -> bool:
    return value is None or value == AUTO


def _single(value: Any) -> bool:
    """Whether a value can be compared with words and counted with."""
    return not isinstance(value, list | Mapping) and not (isinstance(value, float) and not math.isfinite(value))


def _autotuning(work: Work, key: str, section: Mapping[str, Any]) -> None:
    from plait.tune import translate_autotuning

    if not section:
        work.leave(key, section, "an empty section says nothing")
    several = [name for name, value in section.items() if name not in _SECTIONS and not _single(value)]
    for name in several:
        message = f"{show(section[name])} is no single value"
        work.wrong(f"{key}.{name}", message, "Write a number, a word, true or false.")
    if several:
        return
    try:
        found = translate_autotuning(_said(section))
    except ConfigError as error:
        work.problems += error.problems
        return
    answers = {"honoured": work.honour, "mapped": work.map, "without meaning": work.leave}
    for entry in found.account:
        tune = " (of `plait tune`)" if entry.fate != "without meaning" else ""
        answers[entry.fate](f"{key}.{entry.key}", section[entry.key], f"{entry.words}{tune}")
    for name, value in section.items():
        if _is_open(value):
            work.map(f"{key}.{name}", value, "left open: the default of `plait tune`")


TABLE: Table = {"autotuning": Key(SECTION, _autotuning)}
