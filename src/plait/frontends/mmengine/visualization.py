"""Where numbers go besides the log: MMEngine's back ends, as sinks of Plait's monitor."""

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
    """`vis_data/scalars.json`: one JSON object a line, as MMEngine's tools read it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "scalars.json"

    def write(self, event: Event) -> None:
        """Add a line with the event's numbers."""
        if event.kind in _EVENT_KINDS.values():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**scalars(event), "step": event.step}) + "\n")

    def close(self) -> None:
        """It is open only while a line is written."""


@VISBACKENDS.register_module(name="LocalVisBackend")
def local_backend(save_dir: Path, work_dir: Path) -> list[Sink]:
    """The file that MMEngine writes, and the record that `plait report` reads."""
    return [ScalarsFile(save_dir / "vis_data"), JsonlSink(work_dir, 0)]


@VISBACKENDS.register_module(name="TensorboardVisBackend")
def tensorboard_backend(save_dir: Path, work_dir: Path) -> list[Sink]:
    """Curves for TensorBoard."""
    from plait.monitor import TensorBoardSink

    return [TensorBoardSink(save_dir / "vis_data")]


@VISBACKENDS.register_module(name="WandbVisBackend")
def wandb_backend(save_dir: Path, work_dir: Path, init_kwargs: Mapping[str, Any] | None = None) -> list[Sink]:
    """Curves for Weights & Biases; of `init_kwargs`, the `project`."""
    from plait.monitor import WandbSink

    given = dict(init_kwargs or {})
    project = given.pop("project", None)
    if given:
        message = f"{', '.join(given)}: wandb's other settings are its own"
        raise ConfigError(Problem("vis_backends.init_kwargs", message, "Set them as wandb does (WANDB_… variables)."))
    return [WandbSink(work_dir, project)]


@VISUALIZERS.register_module()
class Visualizer:
    """Hands numbers to its back ends; on rank 0 only."""

    def __init__(
        self,
        vis_backends: Sequence[Any] | None = None,
        name: str = "visualizer",
        save_dir: str | Path | None = None,
        *,
        work_dir: Path | None = None,
        is_main: bool = True,
    ) -> None:
        """`save_dir` and the rest come from the runner."""
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
        """Open the back ends, unless they are open."""
        if self._monitor is None:
            folders = self._folders
            sinks = [] if folders is None else [sink for backend in self._backends for sink in _sinks(backend, folders)]
            self._monitor = Monitor(sinks)
        return self._monitor

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, mode: str = "train", **_: Any) -> None:
        """Numbers of one moment."""
        data = dict(scalar_dict) if mode == "train" else {"metrics": dict(scalar_dict)}
        self.open().emit(Event(_EVENT_KINDS[mode], step, int(scalar_dict.get("epoch", 0)), data))

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """One number."""
        self.add_scalars({name: float(value)}, step)

    def close(self) -> None:
        """Close the back ends; what comes later opens them again."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


def _sinks(backend: Any, folders: Mapping[str, Path]) -> list[Sink]:
    if not isinstance(backend, Mapping):
        return [backend]  # a sink of the user's own
    made = VISBACKENDS.build(backend, default_args=folders)
    return list(made) if isinstance(made, list) else [made]


def _check(backend: Any) -> None:
    """What is wrong with the description of a back end shows before any is opened."""
    if not isinstance(backend, Mapping):
        return
    backend_type = backend.get("type")
    backend_type = getattr(backend_type, "__name__", backend_type)
    if backend_type not in tuple(VISBACKENDS):
        message = f"{backend_type!r} is no back end that numbers can go to here"
        remedy = f"Write one of {', '.join(VISBACKENDS)}, or give an object with `write(event)` and `close()`."
        raise ConfigError(Problem("vis_backends.type", message, remedy))
    check_arguments(f"vis_backends.{backend_type}", VISBACKENDS.get(str(backend_type)), backend)


def build_visualizer(cfg: Any, *, save_dir: Path, work_dir: Path, is_main: bool) -> Any:
    """A visualizer from its description; one that is one already stays as it is."""
    if cfg is not None and not isinstance(cfg, Mapping):
        return cfg
    defaults = {"type": "Visualizer", "save_dir": save_dir, "work_dir": work_dir, "is_main": is_main}
    return VISUALIZERS.build({**defaults, **(cfg or {})})
