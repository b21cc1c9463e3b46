"""Data: sources, tokens, packing, the rank-free order, and loading."""

from plait.data.adopt import LoaderParts, adopt
from plait.data.build import build_dataset, prepare, tokenizer_path
from plait.data.cut import cut
from plait.data.loader import Loader, is_stream
from plait.data.order import SampleOrder, sample_seed
from plait.data.packing import PackedTokens
from plait.data.steps import BatchSizes
from plait.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from plait.data.tokens import TokenFile, TokenWriter

__all__ = [
    "BatchSizes",
    "Loader",
    "LoaderParts",
    "PackedTokens",
    "SampleOrder",
    "TextTokenizer",
    "TokenFile",
    "TokenWriter",
    "adopt",
    "build_dataset",
    "cut",
    "is_stream",
    "load_tokenizer",
    "prepare",
    "sample_seed",
    "tokenizer_path",
    "train_tokenizer",
]
