"""`gpu.py --losses`: a small Llama learns to write bytes, by plain torch and by Plait; do the losses agree?

All begin with the same weights and see the same batches. The loss of a run is the mean over its last steps. How far
plain torch in bf16 comes out from plain torch in fp32 is the noise of rounding; Plait in bf16 has to stay within a
few times of that, and fp8 within a bound of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import Result

_PLACES = [folder / "shared" / "data" / "tinyshakespeare.txt" for folder in (common.ROOT.parent, common.ROOT)]
TEXT = str(next((place for place in _PLACES if place.is_file()), _PLACES[0]))
STEPS, LAST = 200, 20
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
BOUND = {
    "plait-bf16": 0.01,
    **dict.fromkeys(("plait-fp8", "plait-fp8-earlier", "plait-fp8-head", "plait-fp8-rowwise"), 0.05),
}
"""By how much a loss may differ from that of plain torch in bf16."""
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def learn(name: str, *, text: str, device: str, tiny: bool) -> Result:
    """In the child: the losses of one run."""
    import torch

    from plait.config.model import LlamaConfig
    from plait.models import build_model

    shape, rows, steps = (SMALL, 2, 2) if tiny else (SHAPE, 32, STEPS)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    found = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long().to(device)
    model = build_model(LlamaConfig(vocab_size=256, tie_embeddings=True, **shape)).to(device)
    draw = torch.Generator().manual_seed(1)
    length = shape["seq_len"]
    starts = torch.randint(len(found) - length - 1, (steps, rows), generator=draw).to(device)
    places = torch.arange(length + 1, device=device)

    def batch(step: int) -> tuple[Any, Any]:
        taken = found[starts[step][:, None] + places]
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    step_of = _plain if name.startswith("plain") else _plait
    step = step_of(model, device, **ROWS[name])
    losses = [float(getattr(one, "loss", one)) for one in (step(*batch(index)) for index in range(steps))]
    last = losses[-min(LAST, steps) :]
    return {"loss": sum(last) / len(last), "losses": losses}


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
    plain = found.get("plain-bf16", {}).get("loss")
    lines = []
    for name, one in found.items():
        if "error" in one:
            lines.append([name, "–", "–", "–", f"did not run: {one['error']}"])
            continue
        apart = None if plain is None else one["loss"] - plain
        bound = BOUND.get(name)
        holds = "" if apart is None or bound is None else "yes" if abs(apart) <= bound else "no"
        lines.append(
            [
                name,
                f"{one['loss']:.4f}",
                "–" if apart is None else f"{apart:+.4f}",
                "–" if bound is None else bound,
                holds,
            ]
        )
    return common.table(["run", "loss", "apart from plain bf16", "bound", "within"], lines)


def main(given: argparse.Namespace, where: Result, forked: Callable[[Callable[[], Result], float], Result]) -> None:
    """Each run in its own process."""
    if given.child is not None:
        common.reply(lambda: learn(given.child, text=given.text, device=given.device, tiny=False))
    if not Path(given.text).is_file():
        raise SystemExit(f"--text: there is no {given.text}")
    text = str(Path(given.text).resolve())
    found: dict[str, Result] = {}
    for name in common.chosen(given.rows, list(ROWS)):
        found[name] = _run(name, text, given, forked)
        common.show(run=name, **{key: value for key, value in found[name].items() if key != "losses"})
    title = (
        f"{common.say_machine(where)}; {given.device}; {Path(text).name}, bytes, {STEPS} steps, mean of the last {LAST}"
    )
    common.finish(given.json, {"machine": where, "losses": found}, f"{title}.\n\n{as_table(found)}")


def _run(name: str, text: str, given: argparse.Namespace, forked: Callable[..., Result]) -> Result:
    if given.tiny:
        return forked(lambda: learn(name, text=text, device="cpu", tiny=True), given.limit)
    options = ("--losses", "--text", text, "--device", given.device)
    said = common.run_child(
        common.itself(__file__.replace("gpu_losses", "gpu"), "--child", name, *options), limit=given.limit
    )
    result: Result = said if "error" in said else said["ranks"][0]
    return result
