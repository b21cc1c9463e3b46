"""`accelerate.utils.memory`: freeing device memory, and retrying with smaller batches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from plait.errors import TrainingError

Function = Callable[..., Any]


def find_executable_batch_size(
    function: Function | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Function:
    """Decorate a function whose first argument is a batch size, to call it with a smaller one whenever memory runs out.

    The next size is 0.9 times the last, or what `reduce_batch_size_fn` returns. Other errors are raised.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wrapped: Function = function

    @wraps(wrapped)
    def run(*args: Any, **kwargs: Any) -> Any:
        size = tried = starting_batch_size
        while size > 0:
            tried = size
            try:
                return wrapped(size, *args, **kwargs)
            except Exception as error:
                if not _is_about_memory(error):
                    raise
            # Outside the `except` block: there, the error would still reference the locals of the function.
            clear_device_cache(garbage_collection=True)
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise TrainingError(
            f"no batch size fits into memory, from starting_batch_size={starting_batch_size} down to {tried}"
        )

    return run


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the memory that the device's allocator has cached."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop these references and free cached memory; return a None for each: `a, b = release_memory(a, b)`."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory.",
    "HIP out of memory.",
    "XPU out of memory.",
)


def _is_about_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES)
