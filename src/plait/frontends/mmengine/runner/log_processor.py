"""The lines of the log: `Epoch(train)  [1][ 10/196]  lr: 3.3333e-04  eta: 0:13:14  time: 0.4073  …`."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import ConfigError, Problem
from plait.frontends.mmengine.registry import LOG_PROCESSORS
from plait.trainer import memory_mib


@LOG_PROCESSORS.register_module()
class LogProcessor:
    """Formats the values of the message hub as a line of the log, and as a dict for the sinks."""

    def __init__(
        self,
        window_size: int = 10,
        by_epoch: bool = True,
        custom_cfg: Sequence[Mapping[str, Any]] | None = None,
        num_digits: int = 4,
        log_with_hierarchy: bool = False,
        mean_pattern: str = r".*(loss|time|data_time|grad_norm).*",
    ) -> None:
        """`custom_cfg`: dicts with `data_src`, `method_name`, `window_size` and optionally `log_name`."""
        self.window_size = window_size
        self.by_epoch = by_epoch
        self.custom_cfg = [dict(entry) for entry in custom_cfg or ()]
        self.num_digits = num_digits
        self.log_with_hierarchy = log_with_hierarchy
        self._mean = re.compile(mean_pattern)
        self._check()

    def _check(self) -> None:
        names: set[str] = set()
        for entry in self.custom_cfg:
            if "data_src" not in entry:
                raise ConfigError(Problem("log_processor.custom_cfg", f"{entry} has no `data_src`", "Name a scalar."))
            name = entry.get("log_name", entry["data_src"])
            if name in names:
                message = f"two entries are called {name!r}"
                raise ConfigError(Problem("log_processor.custom_cfg", message, "Give one another `log_name`."))
            names.add(name)
            if entry.get("window_size") == "epoch" and not self.by_epoch:
                message = "'epoch' needs `by_epoch`"
                raise ConfigError(Problem("log_processor.custom_cfg.window_size", message, "Give a number."))

    def get_log_after_iter(self, runner: Any, batch_idx: int, mode: str) -> tuple[dict[str, Any], str]:
        """Return the values and the line after an iteration of `train`, `val` or `test`."""
        scalars = self._scalars(runner, batch_idx, mode)
        tag = self._tagged(scalars, mode)
        rates = [f"{key}: {value:.{self.num_digits}e}" for key, value in scalars.items() if key.endswith("lr")]
        rest = {key: value for key, value in scalars.items() if not key.endswith("lr")}
        fields = [f"{self._position(runner, batch_idx, mode)}  {' '.join(rates)}"]
        if mode == "train" and self.by_epoch:
            tag["epoch"] = runner.epoch + 1
        tag["iter"] = runner.iter + 1 if runner.is_training else 0
        eta = runner.message_hub.get_info("eta")
        if eta is not None and {"time", "data_time"} <= rest.keys():
            fields.append(f"eta: {datetime.timedelta(seconds=int(eta))}")
            fields += [f"{key}: {rest.pop(key):.{self.num_digits}f}" for key in ("time", "data_time")]
        tag["memory"] = int(memory_mib(runner.device))
        fields.append(f"memory: {tag['memory']}")
        if mode == "train":
            fields += [self._item(key, value) for key, value in rest.items()]
        return tag, "  ".join(fields)

    def get_log_after_epoch(self, runner: Any, batch_idx: int, mode: str) -> tuple[dict[str, Any], str]:
        """Return the values and the line after a validation or test."""
        named = {entry["data_src"] for entry in self.custom_cfg}
        epoch_means: list[dict[str, Any]] = [
            {"data_src": key, "window_size": "epoch", "method_name": "mean"}
            for key in ("time", "data_time")
            if key not in named
        ]
        scalars = self._scalars(runner, batch_idx - 1, mode, epoch_means)
        last: dict[str, Any] = {key: scalars.pop(key) for key in ("data_time", "time") if key in scalars}
        infos = self._infos(runner, mode)
        count = len(runner.loader_of(mode))
        position = f"Iter({mode}) [{count}/{count}]"
        if self.by_epoch:
            epoch = f"[{runner.epoch}]" if mode == "val" else ""
            position = f"Epoch({mode}) {epoch}[{count}/{count}]"
        items = [self._item(key, value) for key, value in {**scalars, **infos, **last}.items()]
        return self._tagged({**scalars, **last}, mode), f"{position}    " + "  ".join(items)

    def _position(self, runner: Any, batch_idx: int, mode: str) -> str:
        if not self.by_epoch and mode == "train":
            total = str(runner.max_iters)
            return f"Iter(train) [{str(runner.iter + 1).rjust(len(total))}/{total}]"
        total = str(len(runner.loader_of(mode)))
        count = f"[{str(batch_idx + 1).rjust(len(total))}/{total}]"
        if not self.by_epoch or mode == "test":
            return f"{'Epoch' if self.by_epoch else 'Iter'}({mode}) {count}"
        epoch = runner.epoch + 1 if mode == "train" else runner.epoch
        # As wide as the number of the last epoch, so that lines are aligned.
        width = len(str(runner.max_epochs)) + 3 if runner.is_training else 0
        return f"Epoch({mode}){f'[{epoch}]'.rjust(width)}{count}"

    def _scalars(
        self, runner: Any, batch_idx: int, mode: str, more: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, float]:
        """Return the latest value of each scalar of a mode, or its mean if its name matches `mean_pattern`."""
        prefix = f"{mode}/"
        histories = {
            key.removeprefix(prefix): history
            for key, history in runner.message_hub.log_scalars.items()
            if key.startswith(prefix)
        }
        values = {
            key: history.mean(self.window_size) if self._mean.search(key) else history.current()
            for key, history in histories.items()
        }
        for entry in (*self.custom_cfg, *more):
            options = dict(entry)
            source = options.pop("data_src")
            name = options.pop("log_name", source)
            if source in histories:
                options["window_size"] = self._window(options.get("window_size"), runner, batch_idx)
                values[name] = histories[source].statistics(**options)
        return values

    def _window(self, size: Any, runner: Any, batch_idx: int) -> int | None:
        if size is None or isinstance(size, int):
            return size
        windows: dict[Any, int] = {"epoch": batch_idx + 1, "global": runner.iter + 1}
        if size not in windows:
            remedy = "Write a number, 'epoch' or 'global'."
            raise ConfigError(Problem("log_processor.custom_cfg.window_size", f"{size!r}", remedy))
        return windows[size]

    def _infos(self, runner: Any, mode: str) -> dict[str, Any]:
        prefix = f"{mode}/"
        info = runner.message_hub.runtime_info.items()
        return {key.removeprefix(prefix): value for key, value in info if key.startswith(prefix)}

    def _tagged(self, scalars: Mapping[str, float], mode: str) -> dict[str, Any]:
        return {f"{mode}/{key}" if self.log_with_hierarchy else key: value for key, value in scalars.items()}

    def _item(self, key: str, value: Any) -> str:
        return f"{key}: {value:.{self.num_digits}f}" if isinstance(value, float) else f"{key}: {value}"
