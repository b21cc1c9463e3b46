"""Starting processes, here and on other hosts. Imports no torch."""

from plait.launch.binding import cpu_count
from plait.launch.command import Command
from plait.launch.failure import tell
from plait.launch.job import Job, Node, Place
from plait.launch.local import gpu_count, launched_size, run_ranks
from plait.launch.memory import StepMemory
from plait.launch.ports import free_port
from plait.launch.rank import host_words, launched_rank, rank_words
from plait.launch.records import STOPPED_CODES, Record
from plait.launch.reform import Machines, become_smaller, run_here, run_share
from plait.launch.verdict import LEAK_REMEDY, growth_text

__all__ = [
    "LEAK_REMEDY",
    "STOPPED_CODES",
    "Command",
    "Job",
    "Machines",
    "Node",
    "Place",
    "Record",
    "StepMemory",
    "become_smaller",
    "cpu_count",
    "free_port",
    "gpu_count",
    "growth_text",
    "host_words",
    "launched_rank",
    "launched_size",
    "rank_words",
    "run_here",
    "run_ranks",
    "run_share",
    "tell",
]
