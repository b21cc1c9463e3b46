"""Starting processes. Imports no torch."""

from plait.launch.failure import tell
from plait.launch.local import cpu_count, free_port, gpu_count, launched_size, run_ranks

__all__ = ["cpu_count", "free_port", "gpu_count", "launched_size", "run_ranks", "tell"]
