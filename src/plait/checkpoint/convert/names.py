"""What others call the parts of a checkpoint, recognised by how they are nested."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.checkpoint.convert.source import Source

MODEL_WORDS = frozenset({"model", "module", "state_dict", "model_state_dict"})
"""Keys under which a whole state dict is put."""
OPTIMIZER_WORDS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state_dict"})
"""Keys under which the state of an optimizer is put."""
STEP_WORDS = ("step", "steps", "global_step", "global_steps", "iteration", "iter_num")
"""Keys under which a count of optimizer steps is put."""

_PIECE = re.compile(r"state\.(?P<parameter>.+)\.(?P<key>[^.]+)")
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def plait_name(path: Sequence[Any]) -> str | None:
    """Plait's name for the tensor at a path of keys; None where it belongs to neither model nor optimizer.

    `("optim", "state", "0.weight", "exp_avg")` and `("optim", "state.0.weight.exp_avg")`, the two forms that
    torch's `get_optimizer_state_dict` makes, become `optim.0.weight.exp_avg`.
    """
    head, rest = str(path[0]), ".".join(str(key) for key in path[1:])
    if head in ("app", "app_state") and rest:
        return plait_name(path[1:])
    if head in MODEL_WORDS and rest:
        return f"model.{clean(rest)}"
    if (head in OPTIMIZER_WORDS or re.fullmatch(r"optimizer_\d+", head)) and rest:
        return _optimizer(rest)
    whole = ".".join(str(key) for key in path)
    return _optimizer(whole) or (f"model.{clean(whole)}" if len(path) == 1 else None)


def _optimizer(text: str) -> str | None:
    found = _PIECE.fullmatch(text)
    return f"optim.{clean(found['parameter'])}.{found['key']}" if found else None


def clean(name: str) -> str:
    """A parameter's name without the wrappers that compiling, sharding and recomputing put into it."""
    return _WRAPPERS.sub("", name)


def without_wrapper(names: Mapping[str, str]) -> dict[str, str]:
    """Take off the `module.` that replicating puts before every name, if it is before every one."""
    bare = [name.partition(".")[2] for name in names.values()]
    if not names or not all(name.startswith("module.") for name in bare):
        return dict(names)
    return {key: name.replace(".module.", ".", 1) for key, name in names.items()}


def guessed_paths(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """How names were nested, where the writer did not say.

    `model.` may be the key of a whole state dict or the beginning of its own names; the first is meant where an
    optimizer stands beside it, or nothing else does.
    """
    parts = {name: name.partition(".") for name in names}
    heads = {head for head, _, _ in parts.values()}
    nested = bool(heads & OPTIMIZER_WORDS) or (bool(heads) and heads <= MODEL_WORDS)
    words = OPTIMIZER_WORDS | (MODEL_WORDS if nested else frozenset())
    return {name: (head, rest) if rest and head in words else (name,) for name, (head, _, rest) in parts.items()}


def steps_of(content: Mapping[Any, Any]) -> int | None:
    """How many steps were made, where a key says so."""
    values = (content.get(word) for word in STEP_WORDS)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


def engine_state(source: Source, steps: int | None) -> dict[str, Any]:
    """The state of a source that was written without Plait: empty where there is no optimizer to go on with.

    `steps` is what its writer said; absent, the optimizer's own count is taken.
    """
    if not any(name.startswith("optim.") for name in source.entries):
        return {}
    if steps is None:
        counts = (name for name in source.entries if name.startswith("optim.") and name.endswith(".step"))
        first = next(counts, None)
        steps = 0 if first is None else int(source.read(first).item())
    return {"engine": {"steps": steps, "skips_in_a_row": 0, "scaler": None}}
