"""Starting processes, here and on other hosts. Imports no torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.launch.binding import cpu_count as cpu_count
    from plait.launch.command import Command as Command
    from plait.launch.environment import cgroup_limit as cgroup_limit
    from plait.launch.environment import report as report
    from plait.launch.failure import tell as tell
    from plait.launch.flags import flags as flags
    from plait.launch.hostfile import read_hostfile as read_hostfile
    from plait.launch.job import Job as Job
    from plait.launch.local import follow_the_launcher as follow_the_launcher
    from plait.launch.local import gpu_count as gpu_count
    from plait.launch.local import launched_size as launched_size
    from plait.launch.local import run_ranks as run_ranks
    from plait.launch.memory import StepMemory as StepMemory
    from plait.launch.options import Options as Options
    from plait.launch.options import misplaced as misplaced
    from plait.launch.options import parse_options as parse_options
    from plait.launch.ports import free_port as free_port
    from plait.launch.preflight import HostCheck as HostCheck
    from plait.launch.preflight import Preflight as Preflight
    from plait.launch.preflight import preflight as preflight
    from plait.launch.prepare import prepare as prepare
    from plait.launch.program import absent as absent
    from plait.launch.program import find_program as find_program
    from plait.launch.rank import host_words as host_words
    from plait.launch.rank import launched_rank as launched_rank
    from plait.launch.records import STOPPED_CODES as STOPPED_CODES
    from plait.launch.records import signal_name as signal_name
    from plait.launch.reform import SMALLER as SMALLER
    from plait.launch.reform import Machines as Machines
    from plait.launch.reform import become_smaller as become_smaller
    from plait.launch.reform import run_here as run_here
    from plait.launch.reform import run_share as run_share
    from plait.launch.setup import Setup as Setup
    from plait.launch.setup import code_folder as code_folder
    from plait.launch.slurm import in_allocation as in_allocation
    from plait.launch.verdict import LEAK_REMEDY as LEAK_REMEDY
    from plait.launch.verdict import growth_text as growth_text
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "binding": ["cpu_count"],
            "command": ["Command"],
            "environment": ["cgroup_limit", "report"],
            "failure": ["tell"],
            "flags": ["flags"],
            "hostfile": ["read_hostfile"],
            "job": ["Job"],
            "local": ["follow_the_launcher", "gpu_count", "launched_size", "run_ranks"],
            "memory": ["StepMemory"],
            "options": ["Options", "misplaced", "parse_options"],
            "ports": ["free_port"],
            "preflight": ["HostCheck", "Preflight", "preflight"],
            "prepare": ["prepare"],
            "program": ["absent", "find_program"],
            "rank": ["host_words", "launched_rank"],
            "records": ["STOPPED_CODES", "signal_name"],
            "reform": ["Machines", "SMALLER", "become_smaller", "run_here", "run_share"],
            "setup": ["Setup", "code_folder"],
            "slurm": ["in_allocation"],
            "verdict": ["LEAK_REMEDY", "growth_text"],
        },
    )
