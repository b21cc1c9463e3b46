"""Decides when a checkpoint is written, and which are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.config import read_json_object
from plait.errors import CheckpointError, ConfigError, Problem
from plait.frontends.mmengine.hooks.hook import Hook, seems_greater
from plait.frontends.mmengine.registry import HOOKS
from plait.frontends.mmengine.runner.folders import forget, keep_newest
from plait.world import on_main


@HOOKS.register_module()
class CheckpointHook(Hook):
    """Every `interval` epochs or iterations, at the end, and after the best validation so far."""

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: int = -1,
        by_epoch: bool = True,
        save_optimizer: bool = True,
        save_param_scheduler: bool = True,
        out_dir: str | Path | None = None,
        max_keep_ckpts: int = -1,
        save_last: bool = True,
        save_best: str | Sequence[str] | None = None,
        rule: str | Sequence[str] | None = None,
        greater_keys: Sequence[str] | None = None,
        less_keys: Sequence[str] | None = None,
        file_client_args: Mapping[str, Any] | None = None,
        filename_tmpl: str | None = None,
        backend_args: Mapping[str, Any] | None = None,
        published_keys: str | Sequence[str] | None = None,
        save_begin: int = 0,
    ) -> None:
        refuse = {
            "file_client_args": (file_client_args, "Write to a folder, and copy it from there."),
            "backend_args": (backend_args, "Write to a folder, and copy it from there."),
            "published_keys": (published_keys, "`plait convert FOLDER FILE --to torch` makes a file of the weights."),
        }
        problems = [
            Problem(f"default_hooks.checkpoint.{key}", f"{value!r} is not offered here", remedy)
            for key, (value, remedy) in refuse.items()
            if value is not None
        ]
        if problems:
            raise ConfigError(problems)
        self.interval, self.by_epoch, self.save_begin = interval, by_epoch, save_begin
        self.options = {"save_optimizer": save_optimizer, "save_param_scheduler": save_param_scheduler}
        self.out_dir, self.max_keep_ckpts, self.save_last = out_dir, max_keep_ckpts, save_last
        self.filename_tmpl = (filename_tmpl or ("epoch_{}" if by_epoch else "iter_{}")).removesuffix(".pth")
        self._found: dict[str, dict[str, Any]] = {}
        """The best so far, by the ending of its keys in the message hub."""
        self._best = [] if save_best is None else [save_best] if isinstance(save_best, str) else list(save_best)
        self._rules = [rule] if isinstance(rule, str) else list(rule or ())
        self._greater, self._less = tuple(greater_keys or ()), tuple(less_keys or ())
        if len(self._rules) not in (0, 1, len(self._best)):
            message = f"{len(self._rules)} rules for {len(self._best)} metrics"
            raise ConfigError(Problem("default_hooks.checkpoint.rule", message, "Give one, or one a metric."))
        for word in self._rules:
            if word not in ("greater", "less"):
                raise ConfigError(Problem("default_hooks.checkpoint.rule", f"{word!r}", "Write 'greater' or 'less'."))

    def before_train(self, runner: Any) -> None:
        """Find the folder, and what the run that goes on had found."""
        self._folder = Path(runner.work_dir if self.out_dir is None else self.out_dir)
        if self.out_dir is not None:
            self._folder /= Path(runner.work_dir).name
        self._note = Path(runner.work_dir) / "best_checkpoints.json"
        done = self._count(runner)
        # A checkpoint is written before the validation that follows it, and does not know what that has found.
        for key, found in on_main(runner.world, self._read_note).items():
            if found["at"] <= done:  # not that of a run which went further than the one that goes on
                runner.message_hub.update_info(f"best_score{key}", found["score"])
                runner.message_hub.update_info(f"best_ckpt{key}", found["path"])
                self._found[key] = found

    def _read_note(self) -> dict[str, Any]:
        found = read_json_object(self._note, CheckpointError, "remove it") if self._note.is_file() else {}
        for key, best in found.items():
            match best:
                case {"at": int(), "score": int() | float(), "path": str()}:
                    continue
            raise CheckpointError(f"{self._note}: {key} is {best!r:.80}, expected at, score and path; remove the file")
        return found

    def _count(self, runner: Any) -> int:
        return int(runner.epoch if self.by_epoch else runner.iter)

    def after_train_epoch(self, runner: Any) -> None:
        """Save, where epochs are counted."""
        due = self.every_n_epochs(runner, self.interval, self.save_begin)
        if self.by_epoch and (due or (self.save_last and self._is_last(runner))):
            runner.logger.info(f"Saving checkpoint at {runner.epoch + 1} epochs")
            self._save(runner, runner.epoch + 1)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save, where iterations are counted."""
        due = self.every_n_train_iters(runner, self.interval, self.save_begin)
        if not self.by_epoch and (due or (self.save_last and self.is_last_train_iter(runner))):
            runner.logger.info(f"Saving checkpoint at {runner.iter + 1} iterations")
            self._save(runner, runner.iter + 1)

    def _is_last(self, runner: Any) -> bool:
        return self.is_last_train_epoch(runner)

    def _save(self, runner: Any, count: int) -> None:
        name = self.filename_tmpl.format(count)
        folder, note = self._folder, Path(runner.work_dir) / "last_checkpoint"

        def tidy() -> None:  # once it is complete
            note.write_text(str(folder / name), encoding="utf-8")
            if self.max_keep_ckpts > 0:
                keep_newest(folder, self.filename_tmpl, self.max_keep_ckpts)

        runner.save_checkpoint(folder, name, by_epoch=self.by_epoch, tidy=tidy, **self.options)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Save, where a metric is the best so far."""
        if not self._best or not runner.is_training or not metrics:
            return
        if self._best == ["auto"]:
            self._best = [next(iter(metrics))]
        for index, metric in enumerate(self._best):
            if metric not in metrics:
                remedy = f"The metrics are {', '.join(metrics)}."
                raise ConfigError(Problem("default_hooks.checkpoint.save_best", f"there is no {metric!r}", remedy))
            self._save_if_best(runner, metric, float(metrics[metric]), index)

    def _save_if_best(self, runner: Any, metric: str, value: float, index: int) -> None:
        rule = (self._rules * len(self._best))[index] if self._rules else None
        greater = seems_greater(metric, self._greater, self._less) if rule is None else rule == "greater"
        hub, key = runner.message_hub, f"_{metric}" if len(self._best) > 1 else ""
        before = hub.get_info(f"best_score{key}")
        if before is not None and (value <= before if greater else value >= before):
            return
        old = hub.get_info(f"best_ckpt{key}")
        unit, count = "epoch" if self.by_epoch else "iter", self._count(runner)
        name = f"best_{metric.replace('/', '_')}_{unit}_{count}"
        path = str(self._folder / name)
        hub.update_info(f"best_score{key}", value)
        hub.update_info(f"best_ckpt{key}", path)
        self._found[key] = {"score": value, "path": path, "at": count}
        note, text, replaced = self._note, json.dumps(self._found), old is not None and old != path

        def tidy() -> None:  # once it is complete
            note.write_text(text, encoding="utf-8")
            if replaced:
                forget(Path(str(old)))

        # Training stands between two epochs here: this one is over, and counted.
        runner.save_checkpoint(self._folder, name, by_epoch=None, tidy=tidy, **self.options)
        if replaced:
            runner.logger.info(f"The previous best checkpoint {old} is removed")
        runner.logger.info(f"The best checkpoint with {value:.4f} {metric} at {count} {unit} is saved to {name}.")
