"""What every schedule of an optimizer's parameter has in common.

A schedule multiplies or moves the value that is there, step by step, so that several may act on one parameter in
turn: a warm-up from 0 to 500, a decay from 500 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from plait.errors import ConfigError, Problem

INF = int(1e9)


class ParamScheduler:
    """Sets `param_name` of every group of an optimizer, from `begin` to `end`, by epochs or by iterations."""

    need_val_args: ClassVar[bool] = False
    """Whether it steps after a validation, with its metrics."""
    counts: ClassVar[tuple[str, ...]] = ("begin", "end")
    """Arguments that count steps, and become iterations where epochs are turned into them."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Arguments that the class gives itself, and a description does not."""

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        """`optimizer` is a torch optimizer or an optim wrapper; `verbose` prints each value that is set."""
        if end <= begin:
            message = f"{end} is not after `begin`, which is {begin}"
            raise ConfigError(Problem(f"param_scheduler.{type(self).__name__}.end", message, "Write a larger number."))
        self.optimizer = optimizer
        self.param_name = param_name
        self.begin, self.end = begin, end
        self.by_epoch = by_epoch
        self.verbose = verbose
        initial = f"initial_{param_name}"
        if isinstance(last_step, bool) or not isinstance(last_step, int) or last_step < -1:
            message = f"{last_step!r} is not a number of steps"
            raise ConfigError(Problem("param_scheduler.last_step", message, "Leave it out, or write -1 or more."))
        for index, group in enumerate(optimizer.param_groups):
            if last_step == -1:
                group.setdefault(initial, read(group, param_name))
            elif initial not in group:
                message = f"{last_step}, but group {index} of the optimizer has no `{initial}`"
                remedy = "Leave last_step out: a checkpoint brings the position of the schedule."
                raise ConfigError(Problem("param_scheduler.last_step", message, remedy))
        self.base_values = [group[initial] for group in optimizer.param_groups]
        self.last_step = last_step
        self._global_step = -1
        self._start()
        self.step()

    def _start(self) -> None:
        """Prepare what the first value needs."""

    @classmethod
    def build_iter_from_epoch(
        cls, optimizer: Any, *, epoch_length: int | None = None, by_epoch: bool = True, **kw: Any
    ) -> Self:
        """The same schedule, described in epochs and stepping with every iteration."""
        if not by_epoch or not epoch_length:
            message = "only a schedule by epochs, over epochs of a known length, can become one by iterations"
            raise ConfigError(Problem("param_scheduler.convert_to_iter_based", message, "Leave it out."))
        for key in cls.counts:
            if kw.get(key) is not None and kw[key] != INF:
                many = isinstance(kw[key], list | tuple)
                kw[key] = [each * epoch_length for each in kw[key]] if many else kw[key] * epoch_length
        return cls(optimizer, **{**kw, "by_epoch": False})

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Go one step on."""
        self._global_step += 1
        if self.begin <= self._global_step < self.end:
            self.last_step += 1
            for index, group in enumerate(self.optimizer.param_groups):
                value = self._value(group, read(group, self.param_name), self.base_values[index])
                write(group, self.param_name, value)
                if self.verbose:
                    print(f"{type(self).__name__}: {self.param_name} of group {index} is {value:.4e}")

    def _value(self, group: dict[str, Any], value: float, base: float) -> float:
        """The next value of a group, whose value is `value` and was `base` in the beginning."""
        raise NotImplementedError

    def get_last_value(self) -> list[float]:
        """The values of all groups."""
        return [read(group, self.param_name) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule is, for a checkpoint."""
        return {"last_step": self.last_step, "global_step": self._global_step, "base_values": list(self.base_values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.last_step, self._global_step = int(state["last_step"]), int(state["global_step"])
        self.base_values = list(state["base_values"])

    @property
    def _length(self) -> int:
        """Steps from the first value to the last."""
        return self.end - self.begin - 1


def read(group: Mapping[str, Any], name: str) -> float:
    """A parameter of a group; the momentum of an optimizer with betas is the first of them."""
    if name == "momentum" and "momentum" not in group:
        return float(group["betas"][0])
    return float(group[name])


def write(group: dict[str, Any], name: str, value: float) -> None:
    """The opposite of `read`."""
    if name == "momentum" and "momentum" not in group:
        group["betas"] = (value, *group["betas"][1:])
    else:
        group[name] = value
