"""The visualizer: MMEngine's backends as sinks of Plait's monitor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.registry import VISBACKENDS, VISUALIZERS, check_arguments
from plait.monitor import Event, EventKind, JsonlSink, Monitor, Sink, scalars

_EVENT_KINDS = {"train": EventKind.TRAIN, "val": EventKind.VALIDATE, "test": EventKind.TEST}


class ScalarsFile:
    """The sink for `vis_data/scalars.json`: one JSON object per line, the format that MMEngine's tools read."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "scalars.json"

    def write(self, event: Event) -> None:
        """Append a line with the values of an event."""
        if event.kind in _EVENT_KINDS.values():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**scalars(event), "step": event.step}) + "\n")

    def close(self) -> None:
        """Do nothing: the file is open only while a line is written."""


@VISBACKENDS.register_module(name="LocalVisBackend")
def local_backend(save_dir: Path, work_dir: Path) -> list[Sink]:
    """Return two sinks: MMEngine's `scalars.json`, and the event log that `plait report` reads."""
    return [ScalarsFile(save_dir / "vis_data"), JsonlSink(work_dir, 0)]


@VISBACKENDS.register_module(name="TensorboardVisBackend")
def tensorboard_backend(save_dir: Path, work_dir: Path) -> list[Sink]:
    """Return a sink for TensorBoard."""
    from plait.monitor import TensorBoardSink

    return [TensorBoardSink(save_dir / "vis_data")]


@VISBACKENDS.register_module(name="WandbVisBackend")
def wandb_backend(save_dir: Path, work_dir: Path, init_kwargs: Mapping[str, Any] | None = None) -> list[Sink]:
    """Return a sink for Weights & Biases; of `init_kwargs`, only `project` is supported."""
    from plait.monitor import WandbSink

    given = dict(init_kwargs or {})
    project = given.pop("project", None)
    if given:
        message = f"{', '.join(given)}: only `project` is supported"
        raise ConfigError(Problem("vis_backends.init_kwargs", message, "Set WANDB_… environment variables."))
    return [WandbSink(work_dir, project)]


@VISUALIZERS.register_module()
class Visualizer:
    """Passes values to its backends, on rank 0 only."""

    def __init__(
        self,
        vis_backends: Sequence[Any] | None = None,
        name: str = "visualizer",
        save_dir: str | Path | None = None,
        *,
        work_dir: Path | None = None,
        is_main: bool = True,
    ) -> None:
        """The runner sets `save_dir`, `work_dir` and `is_main`; a configuration need not."""
        self.name = name
        self.dataset_meta: dict[str, Any] | None = None
        self._backends = list(vis_backends) if vis_backends is not None else [{"type": "LocalVisBackend"}]
        self._folders: dict[str, Path] | None = None
        if is_main and work_dir is not None:
            self._folders = {"save_dir": Path(save_dir or work_dir), "work_dir": work_dir}
        for backend in self._backends:
            _check(backend)
        self._monitor: Monitor | None = None

    def open(self) -> Monitor:
        """Open the backends unless they are open; return the monitor that writes to them."""
        if self._monitor is None:
            folders = self._folders
            sinks = [] if folders is None else [sink for backend in self._backends for sink in _sinks(backend, folders)]
            self._monitor = Monitor(sinks)
        return self._monitor

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, mode: str = "train", **_: Any) -> None:
        """Write the values of a step."""
        data = dict(scalar_dict) if mode == "train" else {"metrics": dict(scalar_dict)}
        self.open().emit(Event(_EVENT_KINDS[mode], step, int(scalar_dict.get("epoch", 0)), data))

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """Write one value."""
        self.add_scalars({name: float(value)}, step)

    def close(self) -> None:
        """Close the backends; the next value opens them again."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _sinks(backend: Any, folders: Mapping[str, Path]) -> list[Sink]:
    if not isinstance(backend, Mapping):
        return [backend]  # a user's sink
    made = VISBACKENDS.build(backend, default_args=folders)
    return list(made) if isinstance(made, list) else [made]


def _check(backend: Any) -> None:
    """Raise `ConfigError` if the description of a backend is wrong; called before any is opened."""
    if not isinstance(backend, Mapping):
        return
    backend_type = backend.get("type")
    backend_type = getattr(backend_type, "__name__", backend_type)
    if backend_type not in tuple(VISBACKENDS):
        message = f"{backend_type!r} is not supported"
        remedy = f"Write one of {', '.join(VISBACKENDS)}, or pass an object with `write(event)` and `close()`."
        raise ConfigError(Problem("vis_backends.type", message, remedy))
    check_arguments(f"vis_backends.{backend_type}", VISBACKENDS.get(str(backend_type)), backend)


def build_visualizer(cfg: Any, *, save_dir: Path, work_dir: Path, is_main: bool) -> Any:
    """Return the visualizer that a dict describes; a visualizer is returned unchanged."""
    if cfg is not None and not isinstance(cfg, Mapping):
        return cfg
    defaults = {"type": "Visualizer", "save_dir": save_dir, "work_dir": work_dir, "is_main": is_main}
    return VISUALIZERS.build({**defaults, **(cfg or {})})
