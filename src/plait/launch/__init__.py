"""Starts the processes of a run, on this host and on others. Does not import torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.launch import heartbeat as heartbeat
    from plait.launch.controller import Command as Command
    from plait.launch.diagnosis import LEAK_REMEDY as LEAK_REMEDY
    from plait.launch.diagnosis import growth_text as growth_text
    from plait.launch.failure import report_failure as report_failure
    from plait.launch.heartbeat import Phase as Phase
    from plait.launch.hostfile import read_hostfile as read_hostfile
    from plait.launch.job import Job as Job
    from plait.launch.job import cpu_count as cpu_count
    from plait.launch.job import find_program as find_program
    from plait.launch.job import missing_program as missing_program
    from plait.launch.local import end_with_parent as end_with_parent
    from plait.launch.local import gpu_count as gpu_count
    from plait.launch.local import launched_size as launched_size
    from plait.launch.local import run_ranks as run_ranks
    from plait.launch.network import free_port as free_port
    from plait.launch.observer import StepMemory as StepMemory
    from plait.launch.observer import cgroup_limit as cgroup_limit
    from plait.launch.options import LaunchOptions as LaunchOptions
    from plait.launch.options import flags as flags
    from plait.launch.options import misplaced_flag as misplaced_flag
    from plait.launch.options import parse_options as parse_options
    from plait.launch.preflight import HostCheck as HostCheck
    from plait.launch.preflight import Preflight as Preflight
    from plait.launch.preflight import preflight as preflight
    from plait.launch.prepare import PreparedLaunch as PreparedLaunch
    from plait.launch.prepare import code_folder as code_folder
    from plait.launch.prepare import prepare_launch as prepare_launch
    from plait.launch.rank import host_words as host_words
    from plait.launch.rank import launched_rank as launched_rank
    from plait.launch.rank import rank_words as rank_words
    from plait.launch.records import STOPPED_CODES as STOPPED_CODES
    from plait.launch.records import signal_name as signal_name
    from plait.launch.remote import in_allocation as in_allocation
    from plait.launch.restart import MICRO_BATCHES_SPLIT as MICRO_BATCHES_SPLIT
    from plait.launch.restart import Machines as Machines
    from plait.launch.restart import restart_with_smaller_batches as restart_with_smaller_batches
    from plait.launch.restart import run_on_host as run_on_host
    from plait.launch.restart import run_on_machine as run_on_machine
else:
    from plait.lazy import attach_names

    attach_names(__name__)
