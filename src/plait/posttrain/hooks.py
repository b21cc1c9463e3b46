"""Hooks of a post-training phase: report on the data, save tokenizer and adapter, compute the reference of DPO."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from plait.data import Collate, MicroBatch, RankLoader
from plait.distributed import is_sharded, on_main
from plait.errors import TrainingError
from plait.launch import Phase
from plait.monitor import EventKind
from plait.posttrain.data.datasets import PairRows
from plait.posttrain.data.prepare import PhaseData
from plait.posttrain.data.template import CHAT_TEMPLATE, NAME, SETTINGS, OfTokenizer, tokenizer_folder
from plait.posttrain.lora import AdapterSpec, ValueHead, has_transposed, lora_layers, read_adapter, save_adapter
from plait.trainer import Hook

if TYPE_CHECKING:
    from plait.trainer import Runner

_MORE_SETTINGS = ("special_tokens_map.json", "added_tokens.json")


class TellData(Hook):
    """Logs a report on the data and the name of the template; saves the tokenizer, with its chat template if used."""

    name = "posttrain_data"
    priority = 10

    def __init__(self, data: PhaseData) -> None:
        self._data = data

    def before_run(self, runner: Runner) -> None:
        """Log and save before the first step."""
        data, phase = self._data, runner.config.phase
        level = "warning" if data.report.is_unusual else "info"
        runner.emit(EventKind.MESSAGE, level=level, text=f"{phase}: {data.report}")
        where = f" of {data.folder}" if isinstance(data.template, OfTokenizer) else ""
        runner.emit(EventKind.MESSAGE, level="info", text=f"{phase}: template {data.template.kind}{where}")
        on_main(runner.world, lambda: keep_tokenizer(data, Path(runner.config.work_dir)))


def keep_tokenizer(data: PhaseData, folder: Path) -> None:
    """Write the tokenizer into the run's folder, with the tokenizer's chat template if the run uses it.

    Commands that open the run use the template in its folder, so one that another run left there is removed.
    """
    source = tokenizer_folder(data.folder) if isinstance(data.template, OfTokenizer) else None
    if source is not None and source.resolve() == folder.resolve():
        return
    for name in (SETTINGS, CHAT_TEMPLATE, *_MORE_SETTINGS):
        (folder / name).unlink(missing_ok=True)
    data.tokenizer.save(folder / NAME)
    if source is not None:
        for name in (SETTINGS, CHAT_TEMPLATE, *_MORE_SETTINGS):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)


class AdapterFiles(Hook):
    """Writes the adapter in the format of `peft` whenever a checkpoint is written, and at the end."""

    name = "adapter"
    priority = 60

    def __init__(self, spec: AdapterSpec, base: str | None, *, task: str | None) -> None:
        self._spec = spec
        self._base = base
        self._task = task
        self._written: int | None = None

    def before_run(self, runner: Runner) -> None:
        """Warn if the initial adapter names another base model, and if parameters besides the adapter are trained."""
        lora = runner.config.lora
        if lora is not None and lora.adapter is not None:
            strange = read_adapter(lora.adapter).strange_base(self._base)
            if strange is not None:
                runner.warn(f"lora.adapter: {strange}")
        if lora is not None and (lora.also or not lora.only):
            key = "lora.also" if lora.also else "lora.only: false"
            runner.warn(
                f"{key}: what learns beside the adapter is in checkpoints, not in {runner.config.work_dir}/adapter; "
                "`plait convert` writes all of it as one model"
            )

    def after_save(self, runner: Runner) -> None:
        """Write the adapter together with a checkpoint."""
        self._write(runner)

    def after_run(self, runner: Runner) -> None:
        """Write the adapter at the end, also if no checkpoint is written."""
        self._write(runner)

    def _write(self, runner: Runner) -> None:
        if self._written == runner.step:
            return
        self._written = runner.step
        tensors = whole_tensors(runner, lambda name: name.endswith((".lora_A.weight", ".lora_B.weight")))
        heads = {name for name, module in runner.engine.model.named_modules() if isinstance(module, ValueHead)}
        head = whole_tensors(runner, lambda name: name.rpartition(".")[0] in heads)
        layers = {name for names in runner.world.gather(lora_layers(runner.engine.model)) for name in names}
        if len(tensors) != 2 * len(layers):
            raise TrainingError(f"{len(tensors)} matrices were found for {len(layers)} adapters; nothing was written")
        transposed = any(runner.world.gather(has_transposed(runner.engine.model, lora_layers(runner.engine.model))))
        folder = Path(runner.config.work_dir) / "adapter"
        on_main(
            runner.world,
            lambda: save_adapter(
                folder, tensors, self._spec, transposed=transposed, base=self._base, task=self._task, head=head
            ),
        )


def whole_tensors(runner: Runner, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Return the parameters whose names are `wanted`, gathered, on the host and in fp32.

    A collective: every rank must want the same ones.
    """
    tensors = {}
    for entry, tensor in runner.engine.state_tensors().items():
        name = entry.removeprefix("model.")
        if entry.startswith("model.") and wanted(name):
            whole = tensor.full_tensor() if is_sharded(tensor) else tensor
            tensors[name] = whole.detach().cpu().float()
    if runner.world.layout.pp > 1:  # each rank has the layers of its stage
        tensors = {name: tensor for stage in runner.world.gather(tensors) for name, tensor in stage.items()}
    return tensors


class ReferenceWords(Hook):
    """Computes the reference of DPO before the first step: the log-probability of every answer under the first policy.

    The run's own engine computes them, so this works with every strategy, and no second model is needed. Checkpoints
    store them, because the policy of a resumed run has already changed.
    """

    name = "reference"
    priority = 20

    def __init__(self, collate: Collate, *rows: PairRows | None) -> None:
        self._collate = collate
        self._rows = [split for split in rows if split is not None]
        self._known = False

    def before_run(self, runner: Runner) -> None:
        """Compute the reference before the first step."""
        self._ask_once(runner)

    def before_validate(self, runner: Runner) -> None:
        """Compute the reference, since a validation may come before any step."""
        self._ask_once(runner)

    def before_test(self, runner: Runner) -> None:
        """Compute the reference, since a test may come before any step."""
        self._ask_once(runner)

    def _ask_once(self, runner: Runner) -> None:
        if not self._known:  # otherwise this run, or the one that it resumes, has computed it
            runner.enter(Phase.EVALUATE)
            for rows in self._rows:
                self._ask(runner, rows)
            runner.enter(Phase.IDLE)
            self._known = True

    def _ask(self, runner: Runner, rows: PairRows) -> None:
        world, collate = runner.world, self._collate
        loader = RankLoader(
            _Numbered(rows),
            rank=world.data_rank,
            ranks=world.layout.data_parallel,
            batch=runner.batch,
            seed=0,
            shuffle=False,
            collate=lambda items: (collate([item for item, _ in items]), [number for _, number in items]),
        )
        mine: list[tuple[int, float, float]] = []
        for micro_batches in loader.epoch(0):
            for batch in micro_batches:
                inputs, numbers = batch.inputs
                said = runner.engine.evaluate_micro_batch(MicroBatch(inputs, batch.samples)).outputs
                if said is None or not batch.samples:
                    continue
                chosen, rejected = said["logprobs"].float().cpu().chunk(2)
                mine += zip(numbers, chosen.tolist(), rejected.tolist(), strict=True)
        for logprobs in world.gather(mine):
            for number, chosen_one, rejected_one in logprobs:
                rows.reference[number, 0], rows.reference[number, 1] = chosen_one, rejected_one

    def tensors(self, runner: Runner) -> dict[str, Tensor]:
        """Return the log-probabilities of the training and validation data, for a checkpoint."""
        return {str(index): rows.reference for index, rows in enumerate(self._rows)}

    def state(self) -> dict[str, Any]:
        """Return whether the reference is computed."""
        return {"known": self._known}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._known = bool(state["known"])


class _Numbered:
    """A data set whose items are (item, index)."""

    def __init__(self, rows: PairRows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], int]:
        return self._rows[index], index
