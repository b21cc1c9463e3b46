"""How long the rows of `offload.py` should take, so that a machine that is lent is not kept for nothing."""

from __future__ import annotations

import argparse

from nets import LlamaSize

AWAY = {
    "plait-resident": (0.0, 0.0),
    "ds3-ratio": (0.5, 0.0),
    "ds3-ratio-params": (0.5, 0.0),
    "plait-ratio": (0.5, 0.0),
    "plait-auto": (0.3, 0.0),
    "plait-ratio8": (0.6, 0.0),
    "plait-ratio8-bf16": (0.5, 0.0),
    "plait-mix8": (0.5, 0.2),
    "plait-nvme": (0.0, 1.0),
}
"""Shares of the weights that are updated on the host from its memory, and from files; all from memory elsewhere."""
_START_S, BUILD_S = 20.0, 60.0
"""Imports, CUDA and the process group; compiling DeepSpeed's CPU Adam."""
_FILL_GBPS = 1.3
"""New host memory is cleared, pinned and filled so fast."""


def expected(name: str, given: argparse.Namespace, size: LlamaSize) -> dict[str, float]:
    """About how long a row takes to be ready, for a step, and in all: from the plan's account of the update."""
    from plait.config import parse_sections
    from plait.config.strategy import resolve_layout
    from plait.launch import cpu_count
    from plait.plan.hardware import find_hardware, with_cores
    from plait.plan.ledger import Away, host_work

    small = "8" in name
    numbers = size.params + (0 if size.tied else size.vocab * size.dim)
    on_host, in_files = (share * numbers for share in AWAY.get(name, (1.0, 0.0)))
    by_cpu = any(word in name for word in ("ds", "updates", "delayed", "params"))
    offload = {"optimizer": "cpu", "update": "cpu" if by_cpu else "device"}
    optim = {"type": "AdamW8bit" if small else "AdamW"}
    config = parse_sections(precision="bf16", optim=optim, strategy={"offload": offload}).config
    machine = with_cores(find_hardware("h200"), given.cores or cpu_count())
    layout = resolve_layout(config.strategy, size=1, local_size=1)
    state = 2.03 if small else 8.0
    away = Away(on_host, in_files, on_host + in_files)
    work = host_work(away, config, machine, layout, state=state, wide=False)
    passes = given.batch * given.seq * size.flops_per_token(given.seq) * (4 / 3 if given.recompute else 1) / 450e12
    step = passes + work.seconds
    ready = _START_S + (on_host + in_files) * (6 + state) / (_FILL_GBPS * 1e9)
    total = ready + (given.warmup + given.steps + (2 if given.profile else 0)) * step
    return {"ready_s": round(ready), "step_s": round(step, 2), "total_s": round(total)}
