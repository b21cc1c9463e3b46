"""Data of post-training: prompts with answers, pairs of answers, conversations; from files, or generated."""

from plait.posttrain.data.prepare import PhaseData, prepare_data
from plait.posttrain.data.records import ChatMessage, Example
from plait.posttrain.data.tasks import Task, make_task
from plait.posttrain.data.template import ChatTokenizer, make_template

__all__ = [
    "ChatMessage",
    "ChatTokenizer",
    "Example",
    "PhaseData",
    "Task",
    "make_task",
    "make_template",
    "prepare_data",
]
