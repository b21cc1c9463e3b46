"""The decoder of one GPU: a step of few rows takes about as long as reading the weights once.

`DecodeStep` is one token per row through a Llama, `sample_tokens` and `greedy` choose from logits, and `record_tokens`
writes the choices down; all of it can be captured in a CUDA graph. This package is a room of its own: others import
from here, and nothing below.

- `step`: which kernels a step consists of;
- `skinny_gemm`: few rows times a large weight;
- `embed_sample`: embedding look-up, and the head with the choice of the next token;
- `attention`: one query per row over the cache;
- `sampling`: choosing tokens from logits, with a counter-based random number generator;
- `tokens`: bookkeeping of the rows;
- `dependent_launch`: programmatic dependent launch, and prefetching for the next kernel.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.kernels.decode.attention import supports_head as supports_head
    from plait.kernels.decode.embed_sample import RowPositions as RowPositions
    from plait.kernels.decode.sampling import CounterRNG as CounterRNG
    from plait.kernels.decode.sampling import bits_of as bits_of
    from plait.kernels.decode.sampling import greedy as greedy
    from plait.kernels.decode.sampling import logprob_of as logprob_of
    from plait.kernels.decode.sampling import pick_index as pick_index
    from plait.kernels.decode.sampling import sample_tokens as sample_tokens
    from plait.kernels.decode.sampling import weights_of as weights_of
    from plait.kernels.decode.sampling import with_seed as with_seed
    from plait.kernels.decode.skinny_gemm import Norm as Norm
    from plait.kernels.decode.step import DecoderWeights as DecoderWeights
    from plait.kernels.decode.step import DecodeStep as DecodeStep
    from plait.kernels.decode.step import LayerWeights as LayerWeights
    from plait.kernels.decode.tokens import TokenRecords as TokenRecords
    from plait.kernels.decode.tokens import record_tokens as record_tokens
else:
    from plait.lazy import attach_names

    attach_names(__name__)
