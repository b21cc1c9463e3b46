"""Trackers of `init_trackers` and `log`: Plait's log sinks (TensorBoard, wandb, files), and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from plait.config import LogConfig, choose
from plait.distributed import World, detect_ranks
from plait.errors import ConfigError, Problem
from plait.monitor import Event, EventKind, Monitor, build_monitor

_SINKS = ("jsonl", "csv", "tensorboard", "wandb", "html")


def choose_trackers(log_with: Any) -> tuple[list[str], list[Any]]:
    """Return the names of sinks in `log_with`, and the user's own trackers in it."""
    wanted = log_with if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    names: list[str] = []
    trackers = []
    for item in wanted:
        name = str(getattr(item, "value", item)).lower()
        if item is None:
            continue
        if hasattr(item, "log") and hasattr(item, "finish"):
            trackers.append(item)
        elif name == "all":
            names += ["jsonl", "tensorboard"]
        elif name in _SINKS:
            names.append(name)
        else:
            remedy = f"{choose(item, _SINKS, 'tracker')} Or pass an object with `log` and `finish`."
            raise ConfigError(Problem("log_with", f"{item!r} is not a tracker", remedy))
    return list(dict.fromkeys(names)), trackers


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a tracker's method that only the main process runs, unless the tracker's `main_process_only` is False."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", True) and detect_ranks().rank != 0:
            return None
        return function(self, *args, **kwargs)

    return run


class GeneralTracker:
    """The base class of a user's trackers."""

    main_process_only = True
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [name for name in _NEEDED if name not in dir(self)]
        if missing:
            raise NotImplementedError(f"{type(self).__name__} needs {' and '.join(missing)}")

    def start(self) -> None:
        """Called by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Called with the `config` of `init_trackers`."""

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Called with the values of a step."""

    def finish(self) -> None:
        """Called by `end_training`."""


_NEEDED = ("name", "requires_logging_directory", "tracker")


@dataclass(frozen=True, slots=True)
class SinkTracker:
    """One of Plait's sinks, with the attributes of Accelerate's trackers."""

    name: str
    sink: Any

    @property
    def tracker(self) -> Any:
        """TensorBoard's writer, wandb's run, or for files the sink itself."""
        return getattr(self.sink, "writer", getattr(self.sink, "run", self.sink))

    @property
    def writer(self) -> Any:
        """The same as `tracker`, under TensorBoard's name."""
        return self.tracker

    @property
    def run(self) -> Any:
        """The same as `tracker`, under wandb's name."""
        return self.tracker

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step."""
        self.sink.write(Event(EventKind.TRAIN, step or 0, 0, dict(values)))


class Trackers:
    """The open trackers of a script. Only rank 0 logs."""

    def __init__(self, names: Sequence[str], trackers: Sequence[Any], folder: Path | None, world: World) -> None:
        self._names = list(names)
        self._trackers = list(trackers)
        self._folder = folder
        self._world = world
        self._monitor: Monitor | None = None
        self._next = 0
        """The step number for values that are logged without one."""

    def start(self, project_name: str, config: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        """Open the trackers, and log the script's configuration. `options`: `init_kwargs`, by tracker name."""
        given = [name for name in self._names if name != "wandb" and options.get(name)]
        if given:
            message = f"{', '.join(given)}: Plait's sinks have no such options"
            raise ConfigError(Problem("init_kwargs", message, "Leave them out; only those of wandb are used."))
        if not self._world.is_main:
            return
        if self._names:
            if self._folder is None:
                raise ConfigError(
                    Problem("project_dir", "log_with needs a folder to write to", "Set Accelerator(project_dir=…).")
                )
            log = LogConfig(console="none", sinks=tuple(self._names), wandb_project=project_name)  # type: ignore[arg-type]
            self._monitor = build_monitor(log, self._folder / project_name, rank=0, wandb=options.get("wandb"))
            about = {"title": project_name, "rows": list((config or {}).items()), "config": dict(config or {})}
            self._monitor.emit(Event(EventKind.RUN_START, 0, 0, about))
        for tracker in self._trackers:
            if hasattr(tracker, "start"):
                tracker.start()
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(dict(config))

    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Log the values of one step."""
        if not self._world.is_main:
            return
        if self._monitor is not None:
            at = self._next if step is None else step
            self._monitor.emit(Event(EventKind.TRAIN, at, 0, dict(values)))
            self._next = at + 1
        for tracker in self._trackers:
            tracker.log(dict(values), step=step, **options.get(getattr(tracker, "name", ""), {}))

    @property
    def all(self) -> list[Any]:
        """The user's trackers, and on the main process a `SinkTracker` for each sink."""
        sinks = self._monitor.sinks if self._monitor is not None else ()
        names = ((name, sink) for sink in sinks for name in self._names if name in type(sink).__name__.lower())
        return [*self._trackers, *(SinkTracker(name, sink) for name, sink in names)]

    def get(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker by its name, with `unwrap` the library's own object; None on other ranks than 0."""
        tracker = next((candidate for candidate in self.all if getattr(candidate, "name", None) == name), None)
        if tracker is None and self._world.is_main:
            names = [str(getattr(candidate, "name", type(candidate).__name__)) for candidate in self.all]
            raise ValueError(f"no tracker {name!r}; open (by init_trackers): {', '.join(names) or 'none'}")
        return tracker.tracker if unwrap and tracker is not None and self._world.is_main else tracker

    def finish(self) -> None:
        """Close all trackers."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._world.is_main:
            for tracker in self._trackers:
                tracker.finish()
