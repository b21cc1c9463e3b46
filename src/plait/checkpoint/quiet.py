"""One warning of torch's that says nothing here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_single_process() -> Iterator[None]:
    """Leave out the warning that a checkpoint is meant for one process: with one process, it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield
