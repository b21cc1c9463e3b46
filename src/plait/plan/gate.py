"""The plan that every run makes before it starts, in a forked process."""

from __future__ import annotations

import copy
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.config import RunConfig, sample_unit
from plait.distributed import param_attributes, restore_attributes, restore_rng_state, rng_state
from plait.errors import ConfigError, PlaitError, Problem, in_one_line
from plait.launch import signal_name
from plait.plan.hardware import Hardware, find_hardware, hardware_here
from plait.plan.plan import Plan, make_plan
from plait.plan.rankplan import Known
from plait.plan.remedies import RemedySearch
from plait.plan.search import search
from plait.plan.shares import SHARE, with_ratio
from plait.torch_internals import tree_map_only

# Running a function in a forked process.
#
# A plan loads modules that training does not need and leaves caches behind. In a fork this does not last, and an error
# there does not harm the run.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error sent from the forked process. Errors whose constructor takes arguments cannot be pickled."""

    error_type: type[PlaitError] | None
    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        if isinstance(error, PlaitError):
            return cls(type(error), str(error), vars(error))
        return cls(None, _described(error), {})

    def reason(self) -> str:
        """Raise a `PlaitError`; return any other error as a line of text."""
        if self.error_type is None:
            return self.text
        error = self.error_type.__new__(self.error_type, self.text)
        error.__dict__.update(self.fields)
        raise error


def _described(error: BaseException) -> str:
    """Return an unexpected error as one line, with the function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split("\n\n")[0].split())
    return f"{type(error).__name__}: {said}{where}" if said else f"{type(error).__name__}{where}"


def run_forked(work: Callable[[], T], *, seconds: float) -> T | str:
    """Return what `work` returns in a forked process, or a text why it has no result. Without fork, call it here.

    A `PlaitError` is raised here too. Any other exception is returned as one line of text.
    """
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return work()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _answer(work, writing)
    os.close(writing)
    data: bytes | None = None
    try:
        data = _read(reading, seconds)
    finally:
        os.close(reading)
        if data != b"":
            os.kill(child, signal.SIGKILL)  # it has answered, or has run out of time
        _, status = os.waitpid(child, 0)
    if data is None:
        return f"it took more than {seconds:.0f} s"
    if not data:
        return _how_it_ended(os.waitstatus_to_exitcode(status))
    # From our own child, through a pipe that no other process holds.
    answer = pickle.loads(data)  # noqa: S301  # from a child of this process
    return answer.reason() if isinstance(answer, _Raised) else answer


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code} and without an answer"
    why = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    return f"it was ended by {signal_name(-code)}{why}"


def _answer(work: Callable[[], object], writing: int) -> None:
    """Call `work`, write its result, and exit at once, without the parent's exit handlers."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        try:
            data = pickle.dumps(work())
        except BaseException as error:
            data = pickle.dumps(_Raised.of(error))
        with os.fdopen(writing, "wb") as stream:
            stream.write(data)
        code = 0
    finally:
        os._exit(code)


def _read(reading: int, seconds: float) -> bytes | None:
    end = time.monotonic() + seconds
    chunks: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        chunk = os.read(reading, 65536)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


# The plan of this run. Other modules of the plan are loaded in the forked process only: they take longer than torch.


_TIMEOUT_S = 180.0
"""How long a run waits for its plan."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The predicted memory and step time of a run. Plain values, so that it can be sent between ranks."""

    peak_gib: float
    """Predicted peak of what is measured at the end: tensors on a GPU, the whole process on a CPU."""
    needed_gib: float
    """What each device must have: with the memory that the allocator reserves and that is in use before the run."""
    memory_gib: float
    """What each device has."""
    seconds: float | None
    """Per step; None if the speed of the machine is not known."""
    took: float
    """Seconds that planning took."""
    refusal: ConfigError | None = None
    """Why the run should not start."""


def plan_run(
    config: RunConfig,
    *,
    ranks: int,
    local_ranks: int,
    model: Any = None,
    loss_function: Any = None,
    example: Any = None,
) -> RunPlan | str:
    """Plan this run on this machine in a forked process. Return a text if it cannot be planned.

    `example` is one micro-batch, needed when `config.data` does not determine its shapes.
    """

    def work() -> RunPlan | str:
        return plan_here(config, ranks, local_ranks, model, loss_function, example)

    plan = run_forked(work, seconds=_TIMEOUT_S)
    if isinstance(plan, str) and "fork-based multiprocessing" in plan:
        # autograd does not run in a fork of a process that has run it. Then plan here, and restore the RNG state.
        cpu = torch.device("cpu")
        state = rng_state(cpu)
        plan = work()
        restore_rng_state(state, cpu)
    return plan


def best_settings(config: RunConfig, ranks: int) -> tuple[list[str], str] | str:
    """Return overrides for the fastest layout on this machine and a summary; a text if nothing fits."""
    machine = _machine(config, ranks)
    result = search(config, machine, ranks=ranks)
    best = result.best
    if best is None or best.plan is None:
        return next((candidate.reason for candidate in result.results if candidate.plan is not None), "nothing fits")
    known = machine.kind == "cuda" or machine.measured
    rate = f"{best.plan.tokens_per_second:,.0f} {sample_unit(config.data)}/s, " if known else ""
    summary = f"{rate}{best.plan.needed_gib:.1f} GiB; {len(result.results)} ways in {result.seconds:.0f} s"
    return best.candidate.changes(config), summary


def best_ratio(config: RunConfig, ranks: int) -> list[str] | str:
    """Return an override with a number for `strategy.offload.ratio: auto`; a text if there is none."""
    try:
        share = with_ratio(config, _machine(config, ranks), ranks=ranks).strategy.offload.share
    except PlaitError as error:
        return in_one_line(error)
    return [f"{SHARE}={share:g}"]


def plan_here(
    config: RunConfig, ranks: int, local_ranks: int, model: Any, loss_function: Any, example: Any
) -> RunPlan | str:
    """Return what `plan_run` returns, computed in this process; `plan_run` calls it in a fork."""
    start = time.perf_counter()
    try:
        machine = _machine(config, local_ranks)
        options: dict[str, Any] = {"model": _maker(model), "loss_function": loss_function}
        if example is not None:
            options["make_example"] = lambda _config, _micro: _blank(example)
        options = {key: value for key, value in options.items() if value is not None}
        simulated: Known = {}
        plan = make_plan(config, machine, ranks=ranks, detailed=False, known=simulated, **options)
        remedy_search = RemedySearch(config, machine, ranks, known=simulated, options=options)
        refusal = None if plan.fits else _refusal(config, plan, remedy_search)
        known = machine.kind == "cuda" or bool(machine.measured)
        peak = plan.fullest.ledger.peak[1] / 2**30
        return RunPlan(
            peak if machine.kind == "cuda" else plan.needed_gib,
            plan.needed_gib,
            machine.memory_gib,
            plan.seconds if known else None,
            time.perf_counter() - start,
            refusal,
        )
    except PlaitError as error:
        return in_one_line(error)
    except Exception as error:
        # A model may do what fake tensors do not support; it can be trained all the same.
        return _described(error)


def _machine(config: RunConfig, local_ranks: int) -> Hardware:
    if config.plan.hardware is not None:
        machine = find_hardware(config.plan.hardware, key="plan.hardware")
    elif config.device in ("auto", "cpu", "cuda"):
        machine = hardware_here(config.device)
    else:
        raise ConfigError(Problem("device", f"a run on {config.device} cannot be planned", "Use cuda or cpu."))
    return replace(machine, per_host=max(machine.per_host, local_ranks))


def _maker(model: Any) -> Any:
    """Return a function that makes a copy of a model object with new tensors; other values as they are."""
    if not isinstance(model, nn.Module):
        return model

    attributes = param_attributes(model)

    def make() -> nn.Module:
        tensors: dict[int, Any] = {id(buffer): torch.empty_like(buffer) for buffer in model.buffers()}
        for param in model.parameters():
            tensors[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), param.requires_grad)
        made = copy.deepcopy(model, tensors)
        restore_attributes(made, attributes)
        return made

    return make


def _blank(example: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), example)


def _refusal(config: RunConfig, plan: Plan, remedy_search: RemedySearch) -> ConfigError:
    machine = remedy_search.hardware
    phase, _ = plan.fullest.ledger.peak
    if plan.needed_gib > machine.memory_gib:
        what = f"each device needs {plan.needed_gib:.1f} GiB in the {phase} phase, and has {machine.memory_gib:.1f}"
    else:
        host, phase = plan.host_gib, plan.host_phase
        what = f"a host needs {host:.0f} GiB in the {phase} phase, and has {machine.host_memory_gib:.0f}"
    try:
        sentences = _remedies(config, remedy_search)
    except Exception as error:  # that the run does not fit is known all the same
        sentences = (f"The search for a change that makes it fit failed: {_described(error)}.",)
    sentences = (*sentences, "`plan=warn` starts it anyway.")
    return ConfigError(Problem("strategy", what, " ".join(text for text in sentences if text)))


def _remedies(config: RunConfig, remedy_search: RemedySearch) -> tuple[str, ...]:
    """Return sentences: what makes the run fit, and what was not examined."""
    remedies = list(remedy_search.remedies())
    remedy = ""
    if remedies and remedies[-1].fits:
        least = remedy_search.without_needless(remedies)
        assert least.plan is not None
        remedy = f"With `{' '.join(least.candidate.changes(config))}` it needs {least.plan.needed_gib:.1f} GiB."
    elif not remedy_search.cut:
        remedy = "No change of the strategy makes it fit: use more devices, or a smaller model."
    return remedy, remedy_search.left_out(remedies)
