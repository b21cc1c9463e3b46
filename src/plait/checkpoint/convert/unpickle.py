"""Pickles without their power: only classes that the caller knows are made, and nothing is called but these."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from plait.errors import CheckpointError

Known = Callable[[str, str], Any]
"""Takes a module and a name, and gives what stands for it, or None where it is unknown."""


class _Closed(pickle.Unpickler):
    def __init__(self, file: BinaryIO, known: Known, path: Path) -> None:
        super().__init__(file)
        self._known, self._path = known, path

    def find_class(self, module: str, name: str) -> Any:
        found = self._known(module, name)
        if found is None:
            raise CheckpointError(
                f"{self._path} asks for {module}.{name}, which has no place in such a file; nothing of it was run. "
                "It was made by something else than it seems, or by somebody with ill intent"
            )
        return found


def unpickle(path: Path, known: Known) -> Any:
    """The object in a pickle; names that `known` does not know are a `CheckpointError`, and so is a damaged file."""
    try:
        with path.open("rb") as file:
            return _Closed(file, known, path).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); copy it again") from error


class Record:
    """Stands for an object of a known class: its state, as it was pickled, and no behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.args = state
