"""The message hub, which holds the values of a run, and its logger."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.engine import AsyncHostCopy
from plait.errors import ConfigError, Problem

_REMEMBERED = 1_000_000
_SAVED = 1000
"""The number of latest values of each scalar that a checkpoint stores."""


class HistoryBuffer:
    """The history of one scalar: its values, and a count for each, its weight in means.

    The latest value may not be computed yet by the device. Reading it waits for the device; so does adding the next
    value, but then it usually has been computed. See `engine/update.py` [Note: one step behind].
    """

    def __init__(self, log_history: list[float] | None = None, count_history: list[int] | None = None) -> None:
        self._values: deque[float] = deque(log_history or (), maxlen=_REMEMBERED)
        self._counts: deque[int] = deque(count_history or [1] * len(self._values), maxlen=_REMEMBERED)
        self._pending: tuple[Callable[[], float], int] | None = None

    @property
    def data(self) -> tuple[list[float], list[int]]:
        """All values and counts."""
        self._settle()
        return list(self._values), list(self._counts)

    def update(self, value: float | Callable[[], float], count: int = 1) -> None:
        """Add a value, or a function that waits for the device and returns one."""
        self._settle()
        if callable(value):
            self._pending = value, count
        else:
            self._add(value, count)

    def _add(self, value: float, count: int) -> None:
        self._values.append(value)
        self._counts.append(count)

    def _settle(self) -> None:
        if self._pending is not None:
            (read, count), self._pending = self._pending, None
            self._add(read(), count)

    def current(self) -> float:
        """Return the latest value."""
        self._settle()
        if not self._values:
            raise ConfigError(Problem("log_processor", "has no value yet", "Log after the first iteration."))
        return self._values[-1]

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the latest `window_size` values (None: all), weighted by their counts."""
        values, counts = self._window(window_size)
        return sum(v * c for v, c in zip(values, counts, strict=True)) / sum(counts)

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the latest `window_size` values (None: all)."""
        return max(self._window(window_size)[0])

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the latest `window_size` values (None: all)."""
        return min(self._window(window_size)[0])

    def statistics(self, method_name: str, window_size: int | None = None) -> float:
        """Return the result of the method `mean`, `max`, `min` or `current`."""
        if method_name not in ("mean", "max", "min", "current"):
            remedy = "Write mean, max, min or current."
            raise ConfigError(Problem("log_processor.custom_cfg.method_name", f"{method_name!r}", remedy))
        return self.current() if method_name == "current" else float(getattr(self, method_name)(window_size))

    def _window(self, size: int | None) -> tuple[list[float], list[int]]:
        self._settle()
        size = len(self._values) if size is None else min(size, len(self._values))
        length = len(self._values)
        return (
            [self._values[index] for index in range(length - size, length)],
            [self._counts[index] for index in range(length - size, length)],
        )


class MessageHub:
    """Scalars and other values that the parts of a run share: `runner.message_hub`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log_scalars: dict[str, HistoryBuffer] = {}
        self.runtime_info: dict[str, Any] = {}
        self._not_resumed: set[str] = set()

    def update_scalar(self, key: str, value: Any, count: int = 1, resumed: bool = True) -> None:
        """Add a value to a scalar's history: a number, a tensor, or a function that returns a number."""
        self._mark(key, resumed)
        self.log_scalars.setdefault(key, HistoryBuffer()).update(_number(value), count)

    def update_scalars(self, log_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Add several values; a dict with `value` and `count` sets the count of a value."""
        for key, value in log_dict.items():
            pair = value if isinstance(value, Mapping) else {"value": value}
            self.update_scalar(key, pair["value"], pair.get("count", 1), resumed)

    def update_info(self, key: str, value: Any, resumed: bool = True) -> None:
        """Set a value that is not a scalar."""
        self._mark(key, resumed)
        self.runtime_info[key] = value

    def pop_info(self, key: str, default: Any = None) -> Any:
        """Remove a value; return it, or `default` if it is not set."""
        return self.runtime_info.pop(key, default)

    def update_info_dict(self, info_dict: Mapping[str, Any], resumed: bool = True) -> None:
        """Set several values."""
        for key, value in info_dict.items():
            self.update_info(key, value, resumed)

    def get_scalar(self, key: str) -> HistoryBuffer:
        """Return the history of a scalar."""
        return self.log_scalars[key]

    def get_info(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default`."""
        return self.runtime_info.get(key, default)

    def _mark(self, key: str, resumed: bool) -> None:
        (self._not_resumed.discard if resumed else self._not_resumed.add)(key)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the latest values of each scalar, and other values that JSON can hold."""
        scalars = {
            key: [values[-_SAVED:] for values in buffer.data]
            for key, buffer in self.log_scalars.items()
            if key not in self._not_resumed
        }
        info = {
            key: value
            for key, value in self.runtime_info.items()
            if key not in self._not_resumed and isinstance(value, bool | int | float | str | type(None))
        }
        return {"log_scalars": scalars, "runtime_info": info}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for key, (values, counts) in state.get("log_scalars", {}).items():
            self.log_scalars[key] = HistoryBuffer(values, counts)
        self.runtime_info.update(state.get("runtime_info", {}))


def _number(value: Any) -> float | Callable[[], float]:
    """Return a number; for a CUDA tensor, a function that waits for its copy to the host."""
    if isinstance(value, Tensor) and value.is_cuda:
        arriving = AsyncHostCopy((value.detach().reshape(()),), value.device)
        return lambda: arriving.read()[0]
    if isinstance(value, Tensor):
        return float(value.detach())
    return value if callable(value) else float(value)


def make_logger(level: int | str, file: Path | None, *, is_main: bool) -> logging.Logger:
    """Return the logger of a run: rank 0 logs from `level` on, other ranks errors only."""
    # Not with `getLogger`: several runs in one process would share the logger, and write to each other's files.
    if isinstance(level, str):
        numbers = logging.getLevelNamesMapping()
        if level.upper() not in numbers:
            raise ConfigError(Problem("log_level", f"{level!r}", f"Write one of {', '.join(numbers)}."))
        level = numbers[level.upper()]
    logger = logging.Logger("mmengine", level)
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(level if is_main else logging.ERROR)
    console.setFormatter(_formatter("%m/%d %H:%M:%S"))
    logger.addHandler(console)
    if file is not None and is_main:
        logger.addHandler(_LogFile(file))
    return logger


class _LogFile(logging.Handler):
    """Appends lines to a file, which is open only during each write, so that nothing has to close it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(_formatter("%Y/%m/%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self.format(record) + "\n")
        except OSError:
            self.handleError(record)


def _formatter(date: str) -> logging.Formatter:
    return logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s", date)
