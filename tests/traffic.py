"""What one rank sends, counted: by the counter that plans have, so that theory, plan and run are compared with one."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from plait.plan.timing import CollectiveCall, kind_of, message_of

_WORDS = {"gather": "all_gather", "scatter": "reduce_scatter", "reduce": "all_reduce", "exchange": "all_to_all"}


class SentBytes(TorchDispatchMode):
    """Takes down what this rank sends. A kind of communication that plans do not know is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[CollectiveCall] = []

    @property
    def bytes(self) -> float:
        """All that was sent. Exact where the numbers of ranks are powers of two."""
        return sum(message.sent for message in self.messages)

    def through(self) -> dict[str, int]:
        """The bytes that went through each kind of communication; of a gather and a scatter, the whole."""
        counts: Counter[str] = Counter()
        for message in self.messages:
            counts[_WORDS.get(message.kind, message.kind)] += message.bytes
        return dict(counts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            assert kind_of(func) is not None, f"{func} is not counted"
            message = message_of(func, args, out)
            if message is not None:
                self.messages.append(message)
        return out
