"""`init_trackers`, `log`, `end_training`: Plait's own sinks, and trackers of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.config.train import LogConfig
from plait.config.words import choose
from plait.errors import ConfigError, Problem
from plait.monitor import Monitor, build_monitor
from plait.spec import Event, EventKind
from plait.world import World

_SINKS = ("jsonl", "csv", "tensorboard", "wandb", "html")


def choose_trackers(log_with: Any) -> tuple[list[str], list[Any]]:
    """The sinks by name and the user's own trackers, from what `log_with` was given."""
    wanted = log_with if isinstance(log_with, Sequence) and not isinstance(log_with, str) else [log_with]
    names: list[str] = []
    own = []
    for each in wanted:
        word = str(getattr(each, "value", each)).lower()
        if each is None:
            continue
        if hasattr(each, "log") and hasattr(each, "finish"):
            own.append(each)
        elif word == "all":
            names += ["jsonl", "tensorboard"]
        elif word in _SINKS:
            names.append(word)
        else:
            remedy = f"{choose(each, _SINKS, 'tracker')} Or give an object with `log` and `finish`."
            raise ConfigError(Problem("log_with", f"there is no tracker {each!r} here", remedy))
    return list(dict.fromkeys(names)), own


class Trackers:
    """Where a script's numbers go. Only rank 0 writes."""

    def __init__(self, names: Sequence[str], own: Sequence[Any], folder: Path | None, world: World) -> None:
        self._names = list(names)
        self._own = list(own)
        self._folder = folder
        self._world = world
        self._monitor: Monitor | None = None
        self._next = 0
        """The step of numbers that come without one."""

    def start(self, project_name: str, config: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        """Open the sinks, and write down what the script was started with. `options` are for trackers by their name."""
        given = [name for name in self._names if name != "wandb" and options.get(name)]
        if given:
            message = f"{', '.join(given)}: written by Plait's own sinks, which have no such options"
            raise ConfigError(Problem("init_kwargs", message, "Leave them out; those of wandb are passed on."))
        if not self._world.is_main:
            return
        if self._names:
            if self._folder is None:
                raise ConfigError(
                    Problem("project_dir", "log_with needs a folder to write to", "Give Accelerator(project_dir=…).")
                )
            log = LogConfig(console="none", sinks=tuple(self._names), wandb_project=project_name)  # type: ignore[arg-type]
            self._monitor = build_monitor(log, self._folder / project_name, rank=0, wandb=options.get("wandb"))
            about = {"title": project_name, "rows": list((config or {}).items()), "config": dict(config or {})}
            self._monitor.emit(Event(EventKind.RUN_START, 0, 0, about))
        for tracker in self._own:
            if config is not None and hasattr(tracker, "store_init_configuration"):
                tracker.store_init_configuration(dict(config))

    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        """Write numbers of one step."""
        if not self._world.is_main:
            return
        if self._monitor is not None:
            at = self._next if step is None else step
            self._monitor.emit(Event(EventKind.TRAIN, at, 0, dict(values)))
            self._next = at + 1
        for tracker in self._own:
            tracker.log(dict(values), step=step, **options.get(getattr(tracker, "name", ""), {}))

    def get(self, name: str) -> Any:
        """The user's own tracker of that name, or the sink."""
        for tracker in self._own:
            if getattr(tracker, "name", None) == name:
                return tracker
        sinks = self._monitor.sinks if self._monitor is not None else ()
        return next((sink for sink in sinks if name in type(sink).__name__.lower()), None)

    def finish(self) -> None:
        """Close everything."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._world.is_main:
            for tracker in self._own:
                tracker.finish()
