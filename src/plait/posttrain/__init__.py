"""From a pretrained model to one that answers: fine-tuning, preferences, reinforcement."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.posttrain.data.prepare import tokenizer_beside as tokenizer_beside
    from plait.posttrain.data.records import Message as Message
    from plait.posttrain.data.template import CHAT_TEMPLATE as CHAT_TEMPLATE
    from plait.posttrain.data.template import OfTokenizer as OfTokenizer
    from plait.posttrain.data.template import Template as Template
    from plait.posttrain.data.template import UnwritableError as UnwritableError
    from plait.posttrain.data.template import chat_template_in as chat_template_in
    from plait.posttrain.data.template import template_of_run as template_of_run
    from plait.posttrain.data.template import tokenizer_folder as tokenizer_folder
    from plait.posttrain.data.tokenizer import NAME as NAME
    from plait.posttrain.data.tokenizer import SETTINGS as SETTINGS
    from plait.posttrain.data.tokenizer import ChatTokenizer as ChatTokenizer
    from plait.posttrain.data.tokenizer import read_settings as read_settings
    from plait.posttrain.data.tokenizer import read_tokenizer as read_tokenizer
    from plait.posttrain.flags import FLAGS as FLAGS
    from plait.posttrain.flags import translate as translate
    from plait.posttrain.judge import Question as Question
    from plait.posttrain.judge import held_out as held_out
    from plait.posttrain.judge import open_judge as open_judge
    from plait.posttrain.judge import run_behind as run_behind
    from plait.posttrain.lora.adapter import read_adapter as read_adapter
    from plait.posttrain.lora.attach import AdapterSpec as AdapterSpec
    from plait.posttrain.lora.attach import attach as attach
    from plait.posttrain.lora.merged import has_adapters as has_adapters
    from plait.posttrain.lora.merged import merged as merged
    from plait.posttrain.pipeline.chain import Step as Step
    from plait.posttrain.pipeline.check import make_steps as make_steps
    from plait.posttrain.pipeline.describe import as_overrides as as_overrides
    from plait.posttrain.pipeline.describe import from_files as from_files
    from plait.posttrain.pipeline.describe import from_words as from_words
    from plait.posttrain.pipeline.describe import with_words as with_words
    from plait.posttrain.pipeline.run import Start as Start
    from plait.posttrain.pipeline.run import run_steps as run_steps
    from plait.posttrain.pipeline.summary import next_commands as next_commands
    from plait.posttrain.pipeline.summary import outcome_of as outcome_of
    from plait.posttrain.run import make_runner as make_runner
    from plait.posttrain.start import fill_all as fill_all
    from plait.posttrain.start import open_start as open_start
    from plait.posttrain.steps import WORDS as WORDS
    from plait.posttrain.steps import read_steps as read_steps
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "data.prepare": ["tokenizer_beside"],
            "data.records": ["Message"],
            "data.template": [
                "CHAT_TEMPLATE",
                "OfTokenizer",
                "Template",
                "UnwritableError",
                "chat_template_in",
                "template_of_run",
                "tokenizer_folder",
            ],
            "data.tokenizer": ["ChatTokenizer", "NAME", "SETTINGS", "read_settings", "read_tokenizer"],
            "flags": ["FLAGS", "translate"],
            "judge": ["Question", "held_out", "open_judge", "run_behind"],
            "lora.adapter": ["read_adapter"],
            "lora.attach": ["AdapterSpec", "attach"],
            "lora.merged": ["has_adapters", "merged"],
            "pipeline.chain": ["Step"],
            "pipeline.check": ["make_steps"],
            "pipeline.describe": ["as_overrides", "from_files", "from_words", "with_words"],
            "pipeline.run": ["Start", "run_steps"],
            "pipeline.summary": ["next_commands", "outcome_of"],
            "run": ["make_runner"],
            "start": ["fill_all", "open_start"],
            "steps": ["WORDS", "read_steps"],
        },
    )
