"""Work that rank 0 does for all, who then succeed or fail with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.errors import PlaitError, TrainingError
from plait.world.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other ranks. Errors with arguments of their own cannot be pickled as they are."""

    kind: type[PlaitError]
    text: str
    fields: dict[str, Any]

    def error(self) -> PlaitError:
        error = self.kind.__new__(self.kind, self.text)
        error.__dict__.update(self.fields)
        return error


def on_main(world: World, action: Callable[[], T]) -> T:
    """Do something on rank 0. Every rank gets its result or, if it fails, an error: none waits for the others."""
    if world.size == 1:
        return action()
    if not world.is_main:
        outcome: T | _Failure = world.broadcast(None)
        if isinstance(outcome, _Failure):
            raise outcome.error()
        return outcome
    try:
        result = action()
    except PlaitError as error:
        world.broadcast(_Failure(type(error), str(error), vars(error)))
        raise
    except Exception as error:
        world.broadcast(_Failure(TrainingError, f"rank 0 failed: {type(error).__name__}: {error}", {}))
        raise
    return world.broadcast(result)  # type: ignore[no-any-return]
