"""`accelerate.utils.versions`: whether a package is new enough."""

from __future__ import annotations

import operator
from importlib import metadata

from torch.torch_version import TorchVersion

_OPERATIONS = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: object, operation: str, requirement_version: str) -> bool:
    """Return whether a `Version`, or the version of a package, satisfies `compare_versions("torch", ">=", "2.4")`."""
    if operation not in _OPERATIONS:
        raise ValueError(f"{operation!r} compares nothing: write one of {', '.join(_OPERATIONS)}")
    given = library_or_version
    version = TorchVersion(metadata.version(given) if type(given) is str else str(given))
    return bool(_OPERATIONS[operation](version, requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version satisfies `is_torch_version(">=", "2.4")`."""
    return compare_versions("torch", operation, version)
