"""`gpu.py --losses`: a small Llama learns to write bytes, by plain torch and by Plait; do the losses agree?

All see the same batches. The loss of a run is the mean over its last steps. What rounding alone does to it is found
by repeating: every row starts several times, from the same weights but for changes of one in a million, and `spread` is
the standard deviation over these starts. Plait in bf16 has to agree with plain torch in bf16 within three standard
errors of their difference, and fp8 within a bound of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import common
from common import Result

_PLACES = [folder / "shared" / "data" / "tinyshakespeare.txt" for folder in (common.ROOT.parent, common.ROOT)]
TEXT = str(next((place for place in _PLACES if place.is_file()), _PLACES[0]))
STEPS, LAST = 200, 20
STARTS = 5
NUDGE = 1e-6
"""By how much, relatively, the weights of one start differ from those of another."""
ERRORS, LEAST = 3.0, 0.002
"""Standard errors by which two rows may differ that are to be the same but for rounding; before their runs part, at
least what rounding in other places does to one step."""
SHAPE = {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 1536, "seq_len": 256}
SMALL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "seq_len": 16}
ROWS: dict[str, dict[str, Any]] = {
    "plain-fp32": {},
    "plain-bf16": {"autocast": True},
    "plait-bf16": {"precision": "bf16"},
    "plait-fp8": {"precision": {"compute": "bf16", "fp8": "tensorwise"}},
    "plait-fp8-earlier": {"precision": {"compute": "bf16", "fp8": {"scales": "earlier"}}},
    "plait-fp8-head": {"precision": {"compute": "bf16", "fp8": {"scales": "earlier", "head": True}}},
    "plait-fp8-rowwise": {"precision": {"compute": "bf16", "fp8": "rowwise"}},
}
BOUND = dict.fromkeys(("plait-fp8", "plait-fp8-earlier", "plait-fp8-head", "plait-fp8-rowwise"), 0.05)
"""By how much a loss may differ from that of plain torch in bf16."""
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def learn(name: str, *, text: str, device: str, tiny: bool) -> Result:
    """In the child: the losses of one row, from every start."""
    import torch

    shape, rows, steps = (SMALL, 2, 2) if tiny else (SHAPE, 32, STEPS)
    torch.set_float32_matmul_precision("highest")
    found = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long().to(device)
    draw = torch.Generator().manual_seed(1)
    length = shape["seq_len"]
    starts = torch.randint(len(found) - length - 1, (steps, rows), generator=draw).to(device)
    places = torch.arange(length + 1, device=device)

    def batch(step: int) -> tuple[Any, Any]:
        taken = found[starts[step][:, None] + places]
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    step_of = _plain if name.startswith("plain") else _plait
    curves = []
    for start in range(2 if tiny else STARTS):
        step = step_of(_begun(shape, start, device), device, **ROWS[name])
        losses = [getattr(one, "loss", one) for one in (step(*batch(index)) for index in range(steps))]
        curves.append([float(loss) for loss in losses])
    ends = [mean(curve[-LAST:]) for curve in curves]
    return {"loss": mean(ends), "spread": stdev(ends), "starts": len(ends), "losses": curves}


def _begun(shape: dict[str, int], start: int, device: str) -> Any:
    """The model before its first step, the same for every row."""
    import torch

    from plait.config.model import LlamaConfig
    from plait.models import build_model

    torch.manual_seed(0)
    model = build_model(LlamaConfig(vocab_size=256, tie_embeddings=True, **shape))
    draw = torch.Generator().manual_seed(start)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.0 + NUDGE * torch.randn(param.shape, generator=draw))
    return model.to(device)


def _plain(model: Any, device: str, *, autocast: bool = False) -> Callable[[Any, Any], Any]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def step(x: Any, y: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            term = model(x, y)
        loss = term.sum / term.count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plait(model: Any, device: str, *, precision: Any) -> Callable[[Any, Any], Any]:
    import plait

    if isinstance(precision, dict) and device == "cpu":
        asked = precision["fp8"]
        precision = {**precision, "fp8": {**(asked if isinstance(asked, dict) else {"recipe": asked}), "emulate": True}}
    engine = plait.prepare(model, optim={"type": "AdamW", **ADAM, "no_decay": []}, precision=precision, device=device)
    return lambda x, y: engine.train_step([(x, y)])


def as_table(found: dict[str, Result]) -> str:
    """One line a run."""
    plain: Result = found.get("plain-bf16", {})
    lines = []
    for name, one in found.items():
        if "error" in one:
            lines.append([name, *"–" * 4, f"did not run: {one['error']}"])
            continue
        numbers = [f"{one['loss']:.4f}", f"{one['spread']:.4f}"]
        if "loss" not in plain or name.startswith("plain"):
            lines.append([name, *numbers, "–", "–", ""])
            continue
        apart = one["loss"] - plain["loss"]
        error = sqrt(one["spread"] ** 2 / one["starts"] + plain["spread"] ** 2 / plain["starts"])
        bound = BOUND.get(name, max(ERRORS * error, LEAST))
        lines.append([name, *numbers, f"{apart:+.4f}", f"{bound:.4f}", "yes" if abs(apart) <= bound else "no"])
    return common.table(["run", "loss", "spread", "apart from plain bf16", "bound", "within"], lines)


def main(given: argparse.Namespace, where: Result, forked: Callable[[Callable[[], Result], float], Result]) -> None:
    """Each run in its own process."""
    if given.child is not None:
        common.reply(lambda: learn(given.child, text=given.text, device=given.device, tiny=False))
    if not Path(given.text).is_file():
        raise SystemExit(f"--text: there is no {given.text}")
    text = str(Path(given.text).resolve())
    names = common.chosen(given.rows, list(ROWS))
    if given.tiny:
        results = [forked(partial(learn, name, text=text, device="cpu", tiny=True), given.limit) for name in names]
    else:
        results = _side_by_side(names, text, given)
    found = dict(zip(names, results, strict=True))
    for name, one in found.items():
        common.show(run=name, **{key: value for key, value in one.items() if key != "losses"})
    kind = f"bytes, {STEPS} steps, mean of the last {LAST}, {STARTS} starts"
    title = f"{common.say_machine(where)}; {given.device}; {Path(text).name}, {kind}"
    common.finish(given.json, {"machine": where, "losses": found}, f"{title}.\n\n{as_table(found)}")


def _side_by_side(names: Sequence[str], text: str, given: argparse.Namespace) -> list[Result]:
    """All runs at once: none of them is timed."""
    gpu = __file__.replace("gpu_losses", "gpu")
    options = ("--losses", "--text", text, "--device", given.device)
    commands = [common.itself(gpu, "--child", name, *options) for name in names]
    return common.run_side_by_side(commands, limit=given.limit)
