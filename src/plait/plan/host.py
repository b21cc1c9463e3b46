"""What a rank's process takes of its host's memory.

[Note: what malloc keeps] A simulated step counts the bytes of tensors, and on a CPU these are the bytes that a process
asks malloc for. What the kernel counts for a process, its resident memory, is more: the interpreter and its libraries,
and what malloc keeps after it was freed. glibc maps large pieces one by one and gives them back at once, but it raises
the size from which on it does so, up to 32 MiB, whenever such a piece is freed. Sharded runs make and free many pieces
of that size; they end up in one heap, and holes between them stay. With the size fixed (`TIGHT_MALLOC`), resident
memory follows the tensors to a few percent. Without it a rank keeps more, and two ranks that do the same keep
different amounts: where parameters are replicated a tenth more, where they are gathered and freed up to two thirds.
The price of the fixed size is time, a fifth of a step and more on a virtual machine, because memory that is new is
cleared page by page.
"""

from __future__ import annotations

from plait.plan.account import Account
from plait.plan.hardware import Hardware
from plait.spec import Phase

PROCESS_BYTES = 372 * 2**20
"""Of a rank that has run a step: Python, torch and the modules that training loads, and their small things."""
CUDA_PROCESS_GIB = 3.0
"""Of a process with a GPU, before it has a model: torch, CUDA's libraries, pinned memory."""
TIGHT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Variables of the environment with which glibc gives memory back when it is free; read when a process starts."""


def host_bytes(account: Account, *, ranks: int = 1) -> float:
    """Resident memory that `ranks` CPU ranks need which do as `account` says, at their highest moment.

    That is what they have under `TIGHT_MALLOC`; see [Note: what malloc keeps].
    """
    return ranks * (PROCESS_BYTES + account.peak[1])


def host_peaks(account: Account, hardware: Hardware) -> dict[Phase, float]:
    """Bytes of host memory that one rank's process has in each phase, at its highest moment."""
    peaks = account.peaks()
    if hardware.kind == "cpu":
        return {phase: PROCESS_BYTES + size for phase, size in peaks.items()}

    def of(*parts: str) -> float:
        return sum(account.numbers.get(f"host_{part}", 0.0) for part in parts)

    found = dict.fromkeys(peaks, of("state", "rooms", "copy"))
    found |= {Phase.BUILD: of("built"), Phase.LOAD: of("built", "reading", "loading"), Phase.INIT: of("state", "rooms")}
    found[Phase.SAVE] = of("state", "rooms", "copy", "saving")
    return {phase: CUDA_PROCESS_GIB * 2**30 + found[phase] for phase in peaks}
