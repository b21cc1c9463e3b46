"""Post-training of a pretrained model: SFT, reward models, DPO, PPO and GRPO."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.posttrain.data.prepare import tokenizer_beside as tokenizer_beside
    from plait.posttrain.data.records import ChatMessage as ChatMessage
    from plait.posttrain.data.template import CHAT_TEMPLATE as CHAT_TEMPLATE
    from plait.posttrain.data.template import NAME as NAME
    from plait.posttrain.data.template import SETTINGS as SETTINGS
    from plait.posttrain.data.template import ChatTokenizer as ChatTokenizer
    from plait.posttrain.data.template import OfTokenizer as OfTokenizer
    from plait.posttrain.data.template import Template as Template
    from plait.posttrain.data.template import UnwritableError as UnwritableError
    from plait.posttrain.data.template import chat_template_in as chat_template_in
    from plait.posttrain.data.template import read_settings as read_settings
    from plait.posttrain.data.template import read_tokenizer as read_tokenizer
    from plait.posttrain.data.template import template_of_run as template_of_run
    from plait.posttrain.data.template import tokenizer_folder as tokenizer_folder
    from plait.posttrain.lora import AdapterSpec as AdapterSpec
    from plait.posttrain.lora import attach as attach
    from plait.posttrain.lora import has_adapters as has_adapters
    from plait.posttrain.lora import merged as merged
    from plait.posttrain.lora import read_adapter as read_adapter
    from plait.posttrain.phases import DEFAULTS as DEFAULTS
    from plait.posttrain.phases import PhaseDescription as PhaseDescription
    from plait.posttrain.phases import PhaseStep as PhaseStep
    from plait.posttrain.phases import Start as Start
    from plait.posttrain.phases import Wanted as Wanted
    from plait.posttrain.phases import as_overrides as as_overrides
    from plait.posttrain.phases import from_files as from_files
    from plait.posttrain.phases import make_steps as make_steps
    from plait.posttrain.phases import next_commands as next_commands
    from plait.posttrain.phases import outcome_of as outcome_of
    from plait.posttrain.phases import run_steps as run_steps
    from plait.posttrain.reward_judge import Question as Question
    from plait.posttrain.reward_judge import held_out as held_out
    from plait.posttrain.reward_judge import open_scorer as open_scorer
    from plait.posttrain.reward_judge import run_behind as run_behind
    from plait.posttrain.run import make_runner as make_runner
    from plait.posttrain.start import fill_all as fill_all
    from plait.posttrain.start import open_start as open_start
else:
    from plait.lazy import attach_names

    attach_names(__name__)
