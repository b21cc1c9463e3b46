"""The Runner, its hooks and metrics."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.trainer.hooks import Best as Best
    from plait.trainer.hooks import Hook as Hook
    from plait.trainer.hooks import WeightAverage as WeightAverage
    from plait.trainer.memory_plan import MemoryPlan as MemoryPlan
    from plait.trainer.metrics import Accuracy as Accuracy
    from plait.trainer.metrics import Metric as Metric
    from plait.trainer.row_check import check_rows as check_rows
    from plait.trainer.runner import Runner as Runner
    from plait.trainer.sources import GivenObjects as GivenObjects
    from plait.trainer.throughput import count_tokens as count_tokens
    from plait.trainer.throughput import memory_mib as memory_mib
    from plait.trainer.throughput import peak_flops as peak_flops
    from plait.trainer.watch import STOPPED as STOPPED
else:
    from plait.lazy import attach_names

    attach_names(__name__)
