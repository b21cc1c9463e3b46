"""What the two formats of Megatron have in common: whole tensors under its names, layers counted over the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.convert.pickled import Inert, field
from plait.checkpoint.convert.source import Entry, Source
from plait.errors import CheckpointError

LAYER = r"decoder\.layers\.(\d+)\."
"""How names of a layer begin."""
IGNORED = r"_extra_state|\.core_attention\."
"""What belongs to the arithmetic of Transformer Engine, and not to the model."""


class Whole(Source):
    """The weights of a checkpoint: `model.<name>`, where the names are those of Megatron Core."""

    kind = "megatron"

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        read: Callable[[str], Tensor],
        args: Arguments,
        facts: Mapping[str, str],
    ) -> None:
        self.path = path
        self.entries = {f"model.{name}": entry for name, entry in entries.items()}
        self.args = args
        self.tied = not args("untie_embeddings_and_output_weights", False)
        """Whether the head is the embedding. The last stage of a pipeline has a copy of it then."""
        self.facts = {"written by": "Megatron", **facts, "left out": "the optimizer's state"}
        self.state = {}
        self._read = read

    def read(self, name: str) -> Tensor:
        """One whole tensor."""
        return self._read(name.removeprefix("model."))

    def close(self) -> None:
        """Nothing is open between two reads."""


class Arguments:
    """The command line that a checkpoint was trained with, as Megatron saves it."""

    def __init__(self, saved: Any, path: Path) -> None:
        if not isinstance(saved, Inert):
            raise CheckpointError(
                f"{path} does not hold the arguments of its training (`args`), which tell how many heads its attention "
                "has; save it with Megatron-LM, whose checkpoints do"
            )
        self._saved, self._path = saved, path

    def __call__(self, name: str, default: Any = None) -> Any:
        """One of them; `default` where it is absent or None."""
        found = field(self._saved, name)
        return default if found is None else found

    def count(self, name: str) -> int:
        """One that must be a whole number."""
        found = self(name)
        if not isinstance(found, int):
            raise CheckpointError(f"{self._path}: its arguments say nothing of {name}, which is needed to read it")
        return found
