"""Text generation with a trained model, or with one in training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.generate.conversation import CLOSE as CLOSE
    from plait.generate.conversation import OPEN as OPEN
    from plait.generate.conversation import Conversation as Conversation
    from plait.generate.conversation import ToolCall as ToolCall
    from plait.generate.conversation import Turn as Turn
    from plait.generate.conversation import cut as cut
    from plait.generate.conversation import printable as printable
    from plait.generate.conversation import read_calls as read_calls
    from plait.generate.generator import CONTEXT_KEYS as CONTEXT_KEYS
    from plait.generate.generator import Generator as Generator
    from plait.generate.generator import context_of as context_of
    from plait.generate.generator import generate as generate
    from plait.generate.hybrid import HybridEngine as HybridEngine
    from plait.generate.hybrid import cache_bytes as cache_bytes
    from plait.generate.options import Completion as Completion
    from plait.generate.options import Sampling as Sampling
    from plait.generate.perplexity import Perplexity as Perplexity
    from plait.generate.perplexity import measure_perplexity as measure_perplexity
    from plait.generate.perplexity import page_of as page_of
    from plait.generate.sample import sample as sample
    from plait.generate.serve import LOCAL_NAMES as LOCAL_NAMES
    from plait.generate.serve import Limits as Limits
    from plait.generate.serve import Server as Server
    from plait.generate.streamed import build_streamed as build_streamed
    from plait.generate.vllm import Weights as Weights
else:
    from plait.lazy import attach_names

    attach_names(__name__)
