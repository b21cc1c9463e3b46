"""The plan that every run makes of itself before it starts."""

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

# Doing something in a child, so that this process stays as it was.
#
# A plan loads much that training does not need, and leaves caches behind. In a copy of the process it costs nothing
# lasting, and whatever goes wrong there is no harm to the run.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Raised:
    """An error on its way out of the child. Errors with arguments of their own cannot be pickled as they are."""

    kind: type[PlaitError] | None
    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Raised:
        if isinstance(error, PlaitError):
            return cls(type(error), str(error), vars(error))
        return cls(None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}", {})

    def reason(self) -> str:
        """Raises what somebody has to change in the run; anything else is a reason, with the way to where it arose."""
        if self.kind is None:
            return self.text
        error = self.kind.__new__(self.kind, self.text)
        error.__dict__.update(self.fields)
        raise error


def in_a_child(work: Callable[[], T], *, seconds: float) -> T | str:
    """What `work` returns, from a forked child; a reason where none comes. Without fork, it is done here.

    A `PlaitError` is raised here as well. Any other exception is a reason, with its traceback.
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
            os.kill(child, signal.SIGKILL)  # it has answered, or never will
        _, status = os.waitpid(child, 0)
    if data is None:
        return f"it took more than {seconds:.0f} s"
    if not data:
        return _how_it_ended(os.waitstatus_to_exitcode(status))
    # From our own child, through a pipe that nobody else holds.
    answer = pickle.loads(data)  # noqa: S301  # from a child of this process
    return answer.reason() if isinstance(answer, _Raised) else answer


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code} and without an answer"
    why = ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
    return f"it was ended by {signal_name(-code)}{why}"


def _answer(work: Callable[[], object], writing: int) -> None:
    """Work, write down the result, and end without a trace: nothing of the parent's must run here."""
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
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(reading, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


# What a run expects of itself.
#
# Nothing else of the plan is loaded here: that takes longer than loading torch, and happens in a child.


_PATIENCE_S = 180.0
"""How long a run waits for its plan."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    """What a run expects of itself. Plain values: it travels between ranks."""

    peak_gib: float
    """What the device's own account will say: tensors on a GPU, the whole process on a CPU."""
    needed_gib: float
    memory_gib: float
    seconds: float | None
    """Of a step; None where the machine's speed is not known."""
    took: float
    refusal: ConfigError | None = None
    """Why the run should not start."""


def forecast(
    config: RunConfig,
    *,
    ranks: int,
    local_ranks: int,
    model: Any = None,
    loss_function: Any = None,
    example: Any = None,
) -> RunForecast | str:
    """Plan this run on the machine at hand; a reason where that cannot be.

    `example` is one micro-batch, where the data are no section that tells its shapes. This process stays as it was.
    """

    def look() -> RunForecast | str:

        return look_ahead(config, ranks, local_ranks, model, loss_function, example)

    found = in_a_child(look, seconds=_PATIENCE_S)
    if isinstance(found, str) and "fork-based multiprocessing" in found:
        # A process that has gone backward before cannot do so in a copy; then it is done here, and put right after.
        here = torch.device("cpu")
        state = rng_state(here)
        found = look()
        restore_rng_state(state, here)
    return found


def best_settings(config: RunConfig, ranks: int) -> tuple[list[str], str] | str:
    """Overrides for the fastest way to spread a run over this machine, and what they promise; a reason without any."""
    machine = _machine(config, ranks)
    found = search(config, machine, ranks=ranks)
    best = found.best
    if best is None or best.plan is None:
        return next((each.reason for each in found.found if each.plan is not None), "nothing fits")
    known = machine.kind == "cuda" or machine.measured
    rate = f"{best.plan.tokens_per_second:,.0f} {sample_unit(config.data)}/s, " if known else ""
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
) -> RunForecast | str:
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
        ladder = RemedySearch(config, machine, ranks, known=simulated, options=options)
        refusal = None if plan.fits else _refusal(config, plan, ladder)
        known = machine.kind == "cuda" or bool(machine.measured)
        peak = plan.fullest.account.peak[1] / 2**30
        return RunForecast(
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


def _refusal(config: RunConfig, plan: Plan, ladder: RemedySearch) -> ConfigError:
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
