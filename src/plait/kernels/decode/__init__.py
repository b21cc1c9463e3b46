"""Kernels that generate tokens with a Llama on one GPU: a step of few rows takes as long as reading its weights.

A *row* is a prompt and its answer. `DecodeStep` computes one token per row, `sample_tokens` and `greedy` choose tokens
from logits, and `record_tokens` stores the chosen ones; all of it can be captured in a CUDA graph. Other packages
import from here, not from the modules below.

- `step`: which kernels a step consists of;
- `skinny_gemm`: multiplication of few rows with a large weight;
- `embed_sample`: embedding look-up; the head, together with the choice of the next token;
- `attention`: attention of one new token per row over the cache;
- `sampling`: choosing tokens from logits, with a counter-based random number generator;
- `tokens`: the tokens and counts of the rows so far;
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
