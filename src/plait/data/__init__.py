"""Data: datasets, tokens, packing, the sample order, and loading."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.data.loader import Collate as Collate
    from plait.data.loader import RankLoader as RankLoader
    from plait.data.loader import WorkerExits as WorkerExits
    from plait.data.loader import is_stream as is_stream
    from plait.data.loader import stack as stack
    from plait.data.loader import unwrap_dataloader as unwrap_dataloader
    from plait.data.mixture import MixtureSource as MixtureSource
    from plait.data.objectives import target_length as target_length
    from plait.data.order import SampleOrder as SampleOrder
    from plait.data.order import sample_seed as sample_seed
    from plait.data.order import splitmix64 as splitmix64
    from plait.data.packing import IGNORE as IGNORE
    from plait.data.packing import PackedTokens as PackedTokens
    from plait.data.sources import build_dataset as build_dataset
    from plait.data.sources import prepare as prepare
    from plait.data.sources import tokenizer_path as tokenizer_path
    from plait.data.steps import MicroBatch as MicroBatch
    from plait.data.steps import split_batch as split_batch
    from plait.data.text import find_files as find_files
    from plait.data.text import open_file as open_file
    from plait.data.text import read_object as read_object
    from plait.data.tokenizer import END as END
    from plait.data.tokenizer import TextTokenizer as TextTokenizer
    from plait.data.tokenizer import load_tokenizer as load_tokenizer
    from plait.data.tokenizer import train_tokenizer as train_tokenizer
    from plait.data.tokens import TokenFile as TokenFile
    from plait.data.tokens import TokenWriter as TokenWriter
    from plait.torch_internals import sampler_num_samples as sampler_num_samples
else:
    from plait.lazy import attach_names

    attach_names(__name__)
