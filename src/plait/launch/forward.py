"""Which variables go along to other hosts. Only those named here do; nothing is passed by accident."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from plait.config import read_lines
from plait.errors import WorldError
from plait.spec import FOLDER_VARIABLE

PREFIXES = ("NCCL_", "PYTHON", "TORCH_", "PYTORCH_", "GLOO_", "UCX_", "MV2_", "FI_", "OMP_", "MLFLOW", "PLAIT_")
"""Variables whose names begin so are forwarded."""

_NOT = {"PYTHONHOME", "PYTHONSTARTUP", FOLDER_VARIABLE}
"""They describe this host or this process, not the run."""

ENV_FILES = (".deepspeed_env", ".plait_env")
"""Looked for at home and in the current folder; later ones win."""


def forwarded(present: Mapping[str, str], *, home: Path, folder: Path) -> dict[str, str]:
    """What every rank on every host gets: variables with a known prefix, then those of the files.

    `DS_ENV_FILE` names the file instead, by its name or its path.
    """
    found = {name: value for name, value in present.items() if name.startswith(PREFIXES) and name not in _NOT}
    names = (present["DS_ENV_FILE"],) if "DS_ENV_FILE" in present else ENV_FILES
    read = set()
    for name in names:
        for base in (home, folder):
            path = (base / name).absolute()  # an absolute name stays as it is
            if path.is_file() and path not in read:
                read.add(path)
                found |= read_env_file(path)
    if "DS_ENV_FILE" in present and not read:
        raise WorldError(f"DS_ENV_FILE={present['DS_ENV_FILE']}: there is no such file in {home} or {folder}")
    return found


def here(present: Mapping[str, str] | None = None) -> dict[str, str]:
    """`forwarded`, from this process's environment, home and current folder."""
    return forwarded(os.environ if present is None else present, home=Path.home(), folder=Path.cwd())


def read_env_file(path: Path) -> dict[str, str]:
    """Lines of `NAME=value`; `export` before it and quotes around the value are allowed, `#` begins a comment."""
    found = {}
    for number, line in enumerate(read_lines(path, WorldError), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = re.fullmatch(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", text)
        if match is None:
            raise WorldError(f"{path}:{number}: cannot read {text!r}; write `NAME=value`")
        value = match[2]
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[match[1]] = value[1:-1] if quoted else value
    return found
