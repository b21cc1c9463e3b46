"""`accelerate.utils.tqdm`: a progress bar on the first process of each host alone."""

from __future__ import annotations

from typing import Any

from plait.distributed import detect_ranks
from plait.errors import MissingExtraError


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a tqdm progress bar, which is shown on the first process of each host only."""
    try:
        from tqdm.auto import tqdm as bar  # type: ignore[import-untyped]
    except ImportError as missing:
        raise MissingExtraError("tqdm", "accelerate.utils.tqdm", "hf") from missing
    if main_process_only and detect_ranks().local_rank != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)
