"""Text from a trained model, or from one in training."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.generate.generator import CONTEXT_KEYS as CONTEXT_KEYS
    from plait.generate.generator import Generator as Generator
    from plait.generate.generator import context_of as context_of
    from plait.generate.generator import generate as generate
    from plait.generate.hybrid import HybridEngine as HybridEngine
    from plait.generate.options import Completion as Completion
    from plait.generate.options import Sampling as Sampling
    from plait.generate.perplexity import Perplexity as Perplexity
    from plait.generate.perplexity import measure_perplexity as measure_perplexity
    from plait.generate.printable import printable as printable
    from plait.generate.renamed import Weights as Weights
    from plait.generate.room import cache_bytes as cache_bytes
    from plait.generate.sample import sample as sample
    from plait.generate.serve import HERE as HERE
    from plait.generate.serve import Limits as Limits
    from plait.generate.serve import Server as Server
    from plait.generate.side_by_side import page_of as page_of
    from plait.generate.speaker import Speaker as Speaker
    from plait.generate.speaker import Turn as Turn
    from plait.generate.speaker import cut as cut
    from plait.generate.streamed import build_streamed as build_streamed
    from plait.generate.tools import CLOSE as CLOSE
    from plait.generate.tools import OPEN as OPEN
    from plait.generate.tools import ToolCall as ToolCall
    from plait.generate.tools import read_calls as read_calls
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "generator": ["CONTEXT_KEYS", "Generator", "context_of", "generate"],
            "hybrid": ["HybridEngine"],
            "options": ["Completion", "Sampling"],
            "perplexity": ["Perplexity", "measure_perplexity"],
            "printable": ["printable"],
            "renamed": ["Weights"],
            "room": ["cache_bytes"],
            "sample": ["sample"],
            "serve": ["HERE", "Limits", "Server"],
            "side_by_side": ["page_of"],
            "speaker": ["Speaker", "Turn", "cut"],
            "streamed": ["build_streamed"],
            "tools": ["CLOSE", "OPEN", "ToolCall", "read_calls"],
        },
    )
