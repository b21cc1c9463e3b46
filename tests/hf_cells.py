"""What Plait does with an architecture of `transformers`, measured: a cell of the table in `docs/models.md`.

    with Pools() as pools:
        outcomes = measure("causal-lm", "llama", ("load", "zero3", "tp"), pools)

A cell trains a tiny model for two steps under a technique on two gloo ranks, and compares losses, gradient norms and
every parameter with the same on one process; or holds what Plait computes against `transformers` itself.
"""

from __future__ import annotations

import io
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from plait import Runner
from plait.cli.main import main
from plait.config import HFConfig, LoraConfig
from plait.engine import StepResult
from plait.errors import ModelError
from plait.generate import generate
from plait.models import build_model
from plait.posttrain.lora import AdapterSpec, attach, freeze_others
from plait.testing import RankFailedError, RankPool, full_tensors
from plait.testing.ranks import forked
from plait.trainer import Hook
from tests.hf_models import TOKENS, batch, tiny_model

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "zero3": {"zero": 3},
    "tp": {"layout": {"tp": 2}},
    "pp": {"layout": {"pp": 2}},
    "cp": {"layout": {"cp": 2}},
    "ep": {"layout": {"ep": 2}},
    "lora": {"zero": 3},
}
"""The cells that train on two ranks, and under which strategy."""
CELLS = ("load", "train", "zero3", "tp", "pp", "cp", "ep", "pack", "lora", "generate", "export")
TASKS: Mapping[str, str] = {"image-text": "image-text-to-text", "contrastive": "contrastive-image-text"}
"""What `model.task` calls a family, where that is not its name here."""
OPTIM = {"type": "AdamW", "lr": 1e-2, "eps": 0.1}
"""Steps nearly proportional to gradients: a gradient near zero does not make a whole step; see `tests.multi.parity`."""
TOTAL, MICRO, STEPS = 4, 2, 2
PRELOADED = ("tests.hf_cells", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
LARGEST = 20_000_000
TOLERANCE = 2e-3
"""Of a parameter's largest change in training; of a loss or norm a tenth of it."""


@dataclass
class Outcome:
    """A cell: `equal`, `refused`, `n/a`, `wrong` or `traceback`, and the figure or the reason."""

    outcome: str
    detail: str = ""


class NotApplicableError(Exception):
    """A cell asks for what the architecture has not, or what `transformers` itself cannot do with it."""


class Pools:
    """One process alone and two that work together, which live through all cells."""

    def __init__(self, timeout_s: float = 180.0) -> None:
        self.alone, self.two = RankPool(1, timeout_s=timeout_s), RankPool(2, timeout_s=timeout_s)

    def __enter__(self) -> Pools:
        # Ranks are replaced now and then, and a model of transformers imports much.
        forked().set_forkserver_preload(["plait.testing.loaded", *PRELOADED])
        ensure_running()
        return self

    def __exit__(self, *_: object) -> None:
        self.alone.close()
        self.two.close()


def measure(
    kind: str, model_type: str, cells: Sequence[str], pools: Pools, tell: Callable[[str, Outcome], None] | None = None
) -> dict[str, Outcome]:
    """Return the outcome of each cell."""
    outcomes: dict[str, Outcome] = {}

    def keep(cell: str, outcome: Outcome) -> None:
        outcomes[cell] = outcome
        if tell is not None:
            tell(cell, outcome)

    built = _try(lambda: pools.alone.run(describe, kind, model_type)[0])
    if isinstance(built, Outcome):
        for cell in cells:
            keep(cell, Outcome("n/a", f"transformers does not build or run it: {built.detail}"))
        return outcomes
    references: dict[bool, Any] = {}

    def reference(lora: bool) -> Any:
        if lora not in references:
            references[lora] = _try(lambda: pools.alone.run(train, kind, model_type, None, lora)[0])
        return references[lora]

    for cell in cells:
        if built["draws"] and cell in ("train", "pack", *LAYOUTS):
            keep(cell, Outcome("n/a", "draws random numbers while it trains"))
        elif cell == "ep" and not built["experts"]:
            keep(cell, Outcome("n/a", "no experts"))
        elif cell in DECODERS and kind not in DECODERS[cell]:
            keep(cell, Outcome("n/a", "not a decoder"))
        elif cell == "train":
            found = reference(False)
            keep(cell, found if isinstance(found, Outcome) else _judge_start(found, built["loss"]))
        elif cell in LAYOUTS:
            lora = cell == "lora"
            expected = reference(lora)
            if isinstance(expected, Outcome):
                keep(cell, expected if lora else Outcome("n/a", "one process does not train it; see train"))
                continue
            ranks = _try(partial(pools.two.run, train, kind, model_type, dict(LAYOUTS[cell]), lora))
            keep(cell, ranks if isinstance(ranks, Outcome) else judge(ranks[0], expected))
        else:
            found = _try(partial(pools.alone.run, ALONE[cell], kind, model_type))
            keep(cell, found if isinstance(found, Outcome) else Outcome(*found[0]))
    return outcomes


def _try(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RankFailedError as error:
        text = str(error)
        if error.refusal is not None:
            return Outcome("refused", error.refusal.strip())
        text = "\n".join(line for line in text.splitlines() if "no answer" not in line) or text
        lines = text.strip().splitlines()
        at = [line.strip() for line in lines if line.lstrip().startswith("File ")]
        last = f"{lines[-1].strip()} ({at[-1].partition(', in')[0].rpartition('/')[2]})" if at else lines[-1].strip()
        if f"{NotApplicableError.__name__}:" in text:
            return Outcome("n/a", text.rpartition(f"{NotApplicableError.__name__}:")[2].strip())
        return Outcome("traceback", last)


@dataclass
class Trained:
    """What a run computed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)


class Recorder(Hook):
    """Records losses, norms, and all parameters at the start and the end."""

    name = "tests.hf_cells"
    priority = 10_000

    def __init__(self) -> None:
        self.trained = Trained()

    def before_run(self, runner: Runner) -> None:
        for name, param in runner.engine.model.named_parameters():
            if "lora_" in name:  # as an adapter starts: adding nothing
                param.data.mul_(0.0 if "lora_B" in name else 0.1)
        self.trained.start = _parameters(runner)

    def after_step(self, runner: Runner, result: StepResult) -> None:
        self.trained.losses.append(result.loss)
        self.trained.norms.append(float(result.grad_norm or 0.0))

    def after_run(self, runner: Runner) -> None:
        self.trained.end = _parameters(runner)


def _parameters(runner: Runner) -> dict[str, Tensor]:
    tensors = {name: value for name, value in runner.engine.state_tensors().items() if name.startswith("model.")}
    local = {name: tensor.cpu() for name, tensor in full_tensors(tensors).items()}
    stages = runner.world.gather(local) if runner.world.layout.pp > 1 else [local]
    return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}


class Rows(Dataset[dict[str, Tensor]]):
    """As many rows as one step has, so that every step sees all of them."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self._inputs.items()}


def rows(model: Any, kind: str) -> dict[str, Tensor]:
    """Return the rows of one step; labels of causal models are shifted, as Plait has them, and unequal in number."""
    parts = [batch(model, kind, seed) for seed in range(TOTAL // MICRO)]
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if kind == "causal-lm":
        labels = inputs["labels"].roll(-1, dims=1)
        labels[:, -1] = -100
        for row in range(TOTAL):
            labels[row, : 3 * row] = -100
        inputs["labels"] = labels
    elif kind == "masked-lm":
        masked = torch.arange(TOKENS) % 2 == 0  # as many in each row, since the loss is a mean of each micro-batch
        inputs["labels"] = inputs["input_ids"].where(masked, -100)
    return inputs


def section(kind: str, model_type: str) -> dict[str, Any]:
    """Return the section `model` of a tiny model, as a user would write it."""
    config = json.loads(tiny_model(model_type, kind).config.to_json_string())
    return {"type": "hf", "task": TASKS.get(kind, kind), "config": config}


def describe(rank: int, ranks: int, kind: str, model_type: str) -> dict[str, Any]:
    """Return what `transformers` says of a tiny model: the loss of a batch, and whether it has experts."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(param.numel() for param in tiny_model(model_type, kind).parameters())
        if size > LARGEST:
            raise NotApplicableError(f"{size:,} parameters when small, more than a test can take")
        model = tiny_model(model_type, kind)
        inputs = rows(model, kind)
        torch.manual_seed(0)
        loss = their_loss(model, kind, inputs)
        loss.backward()
        first = [param.grad for param in model.parameters() if param.grad is not None]
        model.zero_grad()
        torch.manual_seed(1)
        their_loss(model, kind, inputs).backward()
        again = [param.grad for param in model.parameters() if param.grad is not None]
    draws = any(not torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(first, again, strict=True))
    experts = any("expert" in name for name, _ in model.named_parameters())
    return {"experts": experts, "draws": draws, "loss": (kind, model_type, inputs)}


def their_loss(model: Any, kind: str, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that `transformers` computes of some rows."""
    if kind != "causal-lm":
        return model(**inputs).loss
    labels = inputs["labels"]
    logits = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def with_adapters(model: Mapping[str, Any]) -> nn.Module:
    """Return a model with adapters, and nothing else to train."""
    built = build_model(HFConfig(**model))
    spec = LoraConfig(rank=4)
    attach(built, AdapterSpec.of(spec), spec.targets)
    freeze_others(built, ())
    return built


def train(
    rank: int, size: int, kind: str, model_type: str, strategy: Mapping[str, Any] | None, lora: bool
) -> Trained | None:
    """Train for two steps; rank 0 returns what was computed."""
    recorder = Recorder()
    model = section(kind, model_type)
    inputs = rows(tiny_model(model_type, kind), kind)
    with tempfile.TemporaryDirectory(prefix="plait-cells-") as folder:
        given = {"model": partial(with_adapters, model) if lora else model, "data": Rows(inputs), "work_dir": folder}
        with Runner(**_sections(strategy), hooks=[recorder], **given) as runner:
            runner.train()
    return recorder.trained if rank == 0 else None


def _sections(strategy: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "strategy": dict(strategy) if strategy else "single",
        "optim": OPTIM,
        "precision": "fp32",
        "batch": {"total": TOTAL, "micro": MICRO},
        "train": {"max_steps": STEPS},
        "seed": 0,
        "device": "cpu",
        "plan": "off",
        "log": {"console": "none", "sinks": []},
        "checkpoint": {"last": False},
    }


def judge(found: Trained, expected: Trained) -> Outcome:
    """Compare a run on ranks with the one on one process."""
    if found.end.keys() != expected.end.keys():
        odd = sorted(found.end.keys() ^ expected.end.keys())
        return Outcome("wrong", f"names differ: {odd[0]} and {len(odd) - 1} more")
    errors = {
        "loss": _relative(found.losses, expected.losses) * 10,
        "gradient norm": _relative(found.norms, expected.norms) * 10,
    }
    moved = {name: float((tensor - expected.start[name]).abs().max()) for name, tensor in _floats(expected.end)}
    most = max(moved.values(), default=0.0)
    for name, tensor in _floats(expected.end):
        size = float(tensor.abs().max()) if tensor.numel() else 0.0
        rounding = 1e3 * torch.finfo(tensor.dtype).eps * size
        for which, mine, theirs in (("", found.end, expected.end), (" at the start", found.start, expected.start)):
            if mine[name].shape != theirs[name].shape:
                return Outcome("wrong", f"{name}{which} has shape {tuple(mine[name].shape)}")
            off = float((mine[name] - theirs[name]).abs().max()) if tensor.numel() else 0.0
            errors[f"{name}{which}"] = off / (max(moved[name], 1e-3 * most) + rounding) if off else 0.0
    return _worst(errors)


def _worst(errors: Mapping[str, float]) -> Outcome:
    name = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    figure = errors[name]
    if figure <= TOLERANCE:
        return Outcome("equal", f"{figure:.1e}")
    return Outcome("wrong", f"{name} is off by {figure:.1e}")


def _floats(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point()]


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(found, expected, strict=True))


def _judge_start(found: Trained, given: tuple[str, str, Mapping[str, Tensor]]) -> Outcome:
    """Compare the first loss with what `transformers` computes with the same weights."""
    kind, model_type, inputs = given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(model_type, kind)
        state = {name.removeprefix("model."): tensor for name, tensor in found.start.items()}
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            loss = float(their_loss(model.train(), kind, inputs))
    unmoved = [n for n, t in _floats(found.end) if torch.equal(t, found.start[n])]
    detail = f"; not trained: {', '.join(unmoved[:3])}" if unmoved else ""
    outcome = _worst({"loss": _relative(found.losses[:1], [loss]) * 10})
    return Outcome(outcome.outcome, outcome.detail + (detail if outcome.outcome == "wrong" else ""))


def load(rank: int, size: int, kind: str, model_type: str) -> tuple[str, str]:
    """Load a folder of `save_pretrained`, and compare outputs with `transformers`."""
    with tempfile.TemporaryDirectory(prefix="plait-cells-") as folder:
        theirs = _saved(kind, model_type, folder)
        model = {"type": "hf", "task": TASKS.get(kind, kind), "path": folder}
        given = {"model": model, "data": Rows(rows(theirs, kind)), "work_dir": folder}
        with Runner(**_sections(None), **given) as runner:
            runner.setup()
            inputs = rows(theirs, kind)
            return _same(_outputs(runner.engine.model, inputs, kind), _their_outputs(theirs, inputs, kind))


def _saved(kind: str, model_type: str, folder: str) -> Any:
    """Return a model whose parameters are all random, after saving it."""
    model = tiny_model(model_type, kind).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator) * 0.02)
    try:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder).eval()
    except Exception as error:
        raise NotApplicableError(f"transformers does not read back what it saves: {_line(error)}") from None
    return again


def _outputs(model: Any, inputs: Mapping[str, Tensor], kind: str) -> Tensor:
    with torch.no_grad():
        if kind != "causal-lm":
            return model.eval()(**inputs).logits
        return model.eval()(**{name: tensor for name, tensor in inputs.items() if name != "labels"})


def _their_outputs(model: Any, inputs: Mapping[str, Tensor], kind: str) -> Tensor:
    with torch.no_grad():
        return model.eval()(**{k: v for k, v in inputs.items() if kind != "causal-lm" or k != "labels"}).logits


def _same(found: Tensor, expected: Tensor) -> tuple[str, str]:
    outcome = _worst({"logits": float((found - expected).abs().max() / expected.abs().max()) * 10})
    return outcome.outcome, outcome.detail


def packed(rank: int, size: int, kind: str, model_type: str) -> tuple[str, str]:
    """Compute the loss and the gradients of two documents in one row, and of each alone."""
    torch.manual_seed(0)
    model: Any = build_model(HFConfig(**section(kind, model_type)))
    inputs = batch(tiny_model(model_type, kind), kind)
    lengths = (6, TOKENS - 6)
    ids = inputs["input_ids"][:1]
    labels = ids.roll(-1, dims=1)
    labels[:, [lengths[0] - 1, -1]] = -100
    documents = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    positions = torch.tensor([[*range(lengths[0]), *range(lengths[1])]])
    together = _gradients(
        model, [{"input_ids": ids, "labels": labels, "document_ids": documents, "positions": positions}]
    )
    parts = [slice(0, lengths[0]), slice(lengths[0], TOKENS)]
    alone = _gradients(model, [{"input_ids": ids[:, part], "labels": labels[:, part]} for part in parts])
    largest = max(float(tensor.abs().max()) for name, tensor in alone.items() if name != "loss")
    errors = {
        name: float((together[name] - tensor).abs().max() / max(float(tensor.abs().max()), 1e-3 * largest))
        for name, tensor in alone.items()
    }
    outcome = _worst(errors | {"loss": errors["loss"] * 10})
    return outcome.outcome, outcome.detail


def _gradients(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    model.zero_grad()
    total = sum(model(**inputs).sum for inputs in batches)
    total.backward()
    return {"loss": total.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def generated(rank: int, size: int, kind: str, model_type: str) -> tuple[str, str]:
    """Generate greedily with Plait, and with `transformers`, from the same weights."""
    theirs = tiny_model(model_type, kind).eval()
    torch.manual_seed(0)
    ours: Any = build_model(HFConfig(**section(kind, model_type))).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    ids = batch(theirs, kind)["input_ids"]
    prompts = [ids[0, :5].tolist(), ids[1, :9].tolist()]
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    settings |= dict.fromkeys(("eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"))
    try:
        expected = [theirs.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    except Exception as error:
        raise NotApplicableError(f"transformers does not generate with it: {_line(error)}") from None
    if kind == "causal-lm":
        answers = generate(ours, prompts, max_new_tokens=6, temperature=0.0)
        found = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    else:
        found = [ours.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    if found == expected:
        return "equal", "0"
    return "wrong", f"{found[0][-6:]} instead of {expected[0][-6:]}"


def exported(rank: int, size: int, kind: str, model_type: str) -> tuple[str, str]:
    """From a folder of `transformers` through two steps of training to one, which `transformers` reads."""
    with tempfile.TemporaryDirectory(prefix="plait-cells-") as temporary:
        folder = Path(temporary)
        theirs = _saved(kind, model_type, str(folder / "start"))
        model = {"type": "hf", "task": TASKS.get(kind, kind), "path": str(folder / "start")}
        sections = {**_sections(None), "checkpoint": {"last": True}, "work_dir": str(folder / "run")}
        inputs = rows(theirs, kind)
        with Runner(**sections, model=model, data=Rows(inputs)) as runner:
            runner.train()
            trained = _outputs(runner.engine.model, inputs, kind)
        _plait("convert", folder / "run", folder / "out", "--to", "hf")
        again, told = type(theirs).from_pretrained(folder / "out", output_loading_info=True)
        odd = {key: sorted(map(str, names)) for key, names in told.items() if names}
        if odd:
            key, names = next(iter(odd.items()))
            return "wrong", f"{key}: {names[0]} and {len(names) - 1} more"
        return _same(trained, _their_outputs(again, inputs, kind))


def _plait(*words: object) -> None:
    with patch.object(sys, "argv", ["plait", *map(str, words)]), redirect_stderr(io.StringIO()) as told:
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise ModelError(told.getvalue()) from None


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


ALONE: Mapping[str, Callable[..., tuple[str, str]]] = {
    "load": load,
    "pack": packed,
    "generate": generated,
    "export": exported,
}
DECODERS: Mapping[str, Sequence[str]] = {"pack": ("causal-lm",), "generate": ("causal-lm", "seq2seq-lm", "image-text")}
__all__ = ["CELLS", "LAYOUTS", "NotApplicableError", "Outcome", "Pools", "measure"]
