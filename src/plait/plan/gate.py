"""The plan that every run makes of itself before it starts."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.config import RunConfig, unit_of
from plait.errors import ConfigError, PlaitError, Problem, in_one_line
from plait.parallel import attributes_of, give_attributes
from plait.plan.expectation import Forecast
from plait.plan.hardware import Hardware, find_hardware, hardware_here
from plait.plan.ladder import Ladder
from plait.plan.plan import Plan, make_plan
from plait.plan.rankplan import Known
from plait.plan.shares import SHARE, with_ratio
from plait.plan.ways import search
from plait.torch_internals import tree_map_only


def best_settings(config: RunConfig, ranks: int) -> tuple[list[str], str] | str:
    """Overrides for the fastest way to spread a run over this machine, and what they promise; a reason without any."""
    machine = _machine(config, ranks)
    found = search(config, machine, ranks=ranks)
    best = found.best
    if best is None or best.plan is None:
        return next((each.reason for each in found.found if each.plan is not None), "nothing fits")
    known = machine.kind == "cuda" or machine.measured
    rate = f"{best.plan.tokens_per_second:,.0f} {unit_of(config.data)}/s, " if known else ""
    words = f"{rate}{best.plan.needed_gib:.1f} GiB; {len(found.found)} ways in {found.seconds:.0f} s"
    return best.candidate.changes(config), words


def best_ratio(config: RunConfig, ranks: int) -> list[str] | str:
    """An override with a number for `strategy.offload.ratio: auto` on this machine; a reason without any."""
    try:
        share = with_ratio(config, _machine(config, ranks), ranks=ranks).strategy.offload.share
    except PlaitError as error:
        return in_one_line(error)
    return [f"{SHARE}={share:g}"]


def look_ahead(
    config: RunConfig, ranks: int, local_ranks: int, model: Any, loss_function: Any, example: Any
) -> Forecast | str:
    """Plan a run here and now; see `expectation.forecast`, which leaves the process as it was."""
    start = time.perf_counter()
    try:
        machine = _machine(config, local_ranks)
        options: dict[str, Any] = {"model": _maker(model), "loss_function": loss_function}
        if example is not None:
            options["make_example"] = lambda _config, _micro: _blank(example)
        options = {key: value for key, value in options.items() if value is not None}
        simulated: Known = {}
        plan = make_plan(config, machine, ranks=ranks, detailed=False, known=simulated, **options)
        ladder = Ladder(config, machine, ranks, known=simulated, options=options)
        refusal = None if plan.fits else _refusal(config, plan, ladder)
        known = machine.kind == "cuda" or bool(machine.measured)
        peak = plan.fullest.account.peak[1] / 2**30
        return Forecast(
            peak if machine.kind == "cuda" else plan.needed_gib,
            plan.needed_gib,
            machine.memory_gib,
            plan.seconds if known else None,
            time.perf_counter() - start,
            refusal,
        )
    except PlaitError as error:
        return in_one_line(error)
    except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, AttributeError) as error:
        # A model may do what tensors without values cannot; its run is not the worse for it.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _machine(config: RunConfig, local_ranks: int) -> Hardware:
    if config.plan.hardware is not None:
        machine = find_hardware(config.plan.hardware, key="plan.hardware")
    elif config.device in ("auto", "cpu", "cuda"):
        machine = hardware_here(config.device)
    else:
        raise ConfigError(
            Problem("device", f"{config.device} is no machine that can be planned for", "Use cuda or cpu.")
        )
    return replace(machine, per_host=max(machine.per_host, local_ranks))


def _maker(model: Any) -> Any:
    """A model that was given as an object, as a function that makes another of the same shapes."""
    if not isinstance(model, nn.Module):
        return model

    attributes = attributes_of(model)

    def make() -> nn.Module:
        tensors: dict[int, Any] = {id(buffer): torch.empty_like(buffer) for buffer in model.buffers()}
        for param in model.parameters():
            tensors[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), param.requires_grad)
        made = copy.deepcopy(model, tensors)
        give_attributes(made, attributes)
        return made

    return make


def _blank(example: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), example)


def _refusal(config: RunConfig, plan: Plan, ladder: Ladder) -> ConfigError:
    machine = ladder.hardware
    phase, _ = plan.fullest.account.peak
    if plan.needed_gib > machine.memory_gib:
        what = (
            f"each device would need {plan.needed_gib:.1f} GiB, in the {phase} phase, and has {machine.memory_gib:.1f}"
        )
    else:
        host, phase = plan.host_gib, plan.host_phase
        what = f"a host would need {host:.0f} GiB, in the {phase} phase, and has {machine.host_memory_gib:.0f}"
    rungs = list(ladder.climb())
    remedy = ""
    if rungs and rungs[-1].fits:
        least = ladder.taken_back(rungs)
        assert least.plan is not None
        remedy = f"With `{' '.join(least.candidate.changes(config))}` it needs {least.plan.needed_gib:.1f} GiB."
    elif not ladder.cut:
        remedy = "Nothing on the ladder makes it fit here: use more devices, or a smaller model."
    left_out = ladder.left_out(rungs)
    sentences = (remedy, left_out, "`plan=warn` starts it all the same.")
    return ConfigError(Problem("strategy", what, " ".join(each for each in sentences if each)))
