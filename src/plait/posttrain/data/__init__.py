"""Examples: prompts with answers, pairs of answers, conversations; from files, or made up."""

from plait.posttrain.data.prepare import PhaseData, prepare_data
from plait.posttrain.data.records import Example, Message
from plait.posttrain.data.tasks import Task, make_task
from plait.posttrain.data.template import make_template
from plait.posttrain.data.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "Example",
    "Message",
    "PhaseData",
    "Task",
    "make_task",
    "make_template",
    "prepare_data",
]
