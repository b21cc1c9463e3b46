"""Pipeline parallelism: layers follow each other over ranks, and micro-batches follow each other through them.

`plan_stages` decides who holds what, `make_stages` makes this rank's part of the model, and `Pipeline` runs it:

    plan = plan_stages(model, ranks=group.size(), schedule="1f1b")
    stages = make_stages(plan, group.rank())
    ...                                     # shard them, give them values, make an optimizer
    pipeline = Pipeline(stages, schedule="1f1b", group=group, device=device)
    pipeline.step(micro_batches, loss_of)   # gradients, summed over micro-batches
    pipeline.tied.sum()                     # and over stages that share weights
"""

from plait.parallel.pipeline.draw import draw_schedule
from plait.parallel.pipeline.layers import LayerSpec, LayerStack, TiedLayerSpec
from plait.parallel.pipeline.measure import agree, measure_layers
from plait.parallel.pipeline.pipeline import Bubble, Pipeline
from plait.parallel.pipeline.run import BeforeBackward, LossOf
from plait.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    OwnSchedule,
    check_micro_batches,
    check_pipeline,
    is_legal,
    make_table,
    nearest_legal,
    placement_of,
    resolve_virtual,
)
from plait.parallel.pipeline.split import Plan, Stage, make_stages, plan_stages, tie_stages
from plait.parallel.pipeline.tied import TiedWeights
from plait.parallel.pipeline.timeline import theoretical_bubble
from plait.parallel.pipeline.traffic import pipeline_traffic

__all__ = [
    "SCHEDULES",
    "Action",
    "BeforeBackward",
    "Bubble",
    "Kind",
    "LayerSpec",
    "LayerStack",
    "LossOf",
    "OwnSchedule",
    "Pipeline",
    "Plan",
    "Stage",
    "TiedLayerSpec",
    "TiedWeights",
    "agree",
    "check_micro_batches",
    "check_pipeline",
    "draw_schedule",
    "is_legal",
    "make_stages",
    "make_table",
    "measure_layers",
    "nearest_legal",
    "pipeline_traffic",
    "placement_of",
    "plan_stages",
    "resolve_virtual",
    "theoretical_bubble",
    "tie_stages",
]
