"""Starting processes. Imports no torch."""

from plait.launch.local import free_port, gpu_count, run_ranks

__all__ = ["free_port", "gpu_count", "run_ranks"]
