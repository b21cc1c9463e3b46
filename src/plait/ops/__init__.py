"""Kernels, each beside its plain twin, and file I/O that does not wait.

Import from the files themselves: `ops.files`, `ops.host`, `ops.adam`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.ops.adam import AdamNumbers as AdamNumbers
    from plait.ops.adam import adam_step as adam_step
    from plait.ops.adam import adam_step_plain as adam_step_plain
    from plait.ops.adam8bit import adam8bit_step as adam8bit_step
    from plait.ops.adam_kernel import Entry as Entry
    from plait.ops.adam_kernel import Tables as Tables
    from plait.ops.adam_many import adam_many as adam_many
    from plait.ops.attention import choose_attention as choose_attention
    from plait.ops.blockwise import PASSING as PASSING
    from plait.ops.blockwise import Levels as Levels
    from plait.ops.blockwise import Packed as Packed
    from plait.ops.blockwise import make_levels as make_levels
    from plait.ops.blockwise import pack_from_host as pack_from_host
    from plait.ops.blockwise import pack_into as pack_into
    from plait.ops.blockwise import unpack_on_host as unpack_on_host
    from plait.ops.blockwise import width_of as width_of
    from plait.ops.blockwise import zeros as zeros
    from plait.ops.chain import AHEAD as AHEAD
    from plait.ops.chain import Ahead as Ahead
    from plait.ops.chance import Chance as Chance
    from plait.ops.chance import with_seed as with_seed
    from plait.ops.crew import Crew as Crew
    from plait.ops.decode_attention import attend_cached as attend_cached
    from plait.ops.decode_attention import takes as takes
    from plait.ops.drafts import drafting as drafting
    from plait.ops.drafts import write_whole as write_whole
    from plait.ops.draw import bits_of as bits_of
    from plait.ops.draw import draw as draw
    from plait.ops.draw import place_of as place_of
    from plait.ops.draw import weights_of as weights_of
    from plait.ops.ends import At as At
    from plait.ops.ends import drawn as drawn
    from plait.ops.ends import likeliest as likeliest
    from plait.ops.ends import look_up as look_up
    from plait.ops.files import FileQueue as FileQueue
    from plait.ops.files import TensorFile as TensorFile
    from plait.ops.files import Transfer as Transfer
    from plait.ops.fp8 import fp8_linears as fp8_linears
    from plait.ops.fp8 import scaled_product as scaled_product
    from plait.ops.fp8_cast import E4M3 as E4M3
    from plait.ops.fp8_cast import E5M2 as E5M2
    from plait.ops.fp8_cast import MULTIPLE as MULTIPLE
    from plait.ops.fp8_cast import Cast as Cast
    from plait.ops.fp8_cast import cast as cast
    from plait.ops.fp8_cast import is_fused as is_fused
    from plait.ops.fp8_cast import peaks_of as peaks_of
    from plait.ops.fp8_earlier import AT_ONCE as AT_ONCE
    from plait.ops.fp8_earlier import FORMATS as FORMATS
    from plait.ops.fp8_earlier import Earlier as Earlier
    from plait.ops.fp8_gated import fp8_feed_forward as fp8_feed_forward
    from plait.ops.fp8_kernel import pair as pair
    from plait.ops.fp8_kernel import turn as turn
    from plait.ops.gated import feed_forward as feed_forward
    from plait.ops.greedy import greedy as greedy
    from plait.ops.greedy import logprob_of as logprob_of
    from plait.ops.host import copy_gbps as copy_gbps
    from plait.ops.host import host_empty as host_empty
    from plait.ops.host import link_gbps as link_gbps
    from plait.ops.host import rounded as rounded
    from plait.ops.linears import is_plain as is_plain
    from plait.ops.linears import is_untouched as is_untouched
    from plait.ops.linears import spoken_for as spoken_for
    from plait.ops.linears import through_all as through_all
    from plait.ops.note import Book as Book
    from plait.ops.note import note as note
    from plait.ops.record import record as record
    from plait.ops.record import recording_stream as recording_stream
    from plait.ops.rms_norm import add_rms_norm as add_rms_norm
    from plait.ops.rms_norm import rms_norm as rms_norm
    from plait.ops.rms_norm import rms_norm_beside as rms_norm_beside
    from plait.ops.rotate import rotate as rotate
    from plait.ops.scaled import scaled as scaled
    from plait.ops.scaled import scaled_plain as scaled_plain
    from plait.ops.skinny import EARLY as EARLY
    from plait.ops.skinny import Norm as Norm
    from plait.ops.skinny import Stream as Stream
    from plait.ops.skinny import add as add
    from plait.ops.skinny import ahead_of as ahead_of
    from plait.ops.skinny import gated as gated
    from plait.ops.skinny import make_counters as make_counters
    from plait.ops.skinny import project as project
    from plait.ops.swiglu import swiglu as swiglu
    from plait.ops.token_mixers import attends_both_ways as attends_both_ways
    from plait.ops.token_mixers import blocks_without_registry as blocks_without_registry
    from plait.ops.token_mixers import mixer_without_mask as mixer_without_mask
    from plait.ops.triton import HAS_TRITON as HAS_TRITON
    from plait.ops.triton import has_kernels as has_kernels
    from plait.ops.triton import interprets as interprets
    from plait.ops.triton import on_device_of as on_device_of
else:
    from plait.lazy import attach_names

    attach_names(
        __name__,
        {
            "adam": ["AdamNumbers", "adam_step", "adam_step_plain"],
            "adam8bit": ["adam8bit_step"],
            "adam_kernel": ["Entry", "Tables"],
            "adam_many": ["adam_many"],
            "attention": ["choose_attention"],
            "blockwise": [
                "Levels",
                "PASSING",
                "Packed",
                "make_levels",
                "pack_from_host",
                "pack_into",
                "unpack_on_host",
                "width_of",
                "zeros",
            ],
            "chain": ["AHEAD", "Ahead"],
            "chance": ["Chance", "with_seed"],
            "crew": ["Crew"],
            "decode_attention": ["attend_cached", "takes"],
            "drafts": ["drafting", "write_whole"],
            "draw": ["bits_of", "draw", "place_of", "weights_of"],
            "ends": ["At", "drawn", "likeliest", "look_up"],
            "files": ["FileQueue", "TensorFile", "Transfer"],
            "fp8": ["fp8_linears", "scaled_product"],
            "fp8_cast": ["Cast", "E4M3", "E5M2", "MULTIPLE", "cast", "is_fused", "peaks_of"],
            "fp8_earlier": ["AT_ONCE", "Earlier", "FORMATS"],
            "fp8_gated": ["fp8_feed_forward"],
            "fp8_kernel": ["pair", "turn"],
            "gated": ["feed_forward"],
            "greedy": ["greedy", "logprob_of"],
            "host": ["copy_gbps", "host_empty", "link_gbps", "rounded"],
            "linears": ["is_plain", "is_untouched", "spoken_for", "through_all"],
            "note": ["Book", "note"],
            "record": ["record", "recording_stream"],
            "rms_norm": ["add_rms_norm", "rms_norm", "rms_norm_beside"],
            "rotate": ["rotate"],
            "scaled": ["scaled", "scaled_plain"],
            "skinny": ["EARLY", "Norm", "Stream", "add", "ahead_of", "gated", "make_counters", "project"],
            "swiglu": ["swiglu"],
            "token_mixers": ["attends_both_ways", "blocks_without_registry", "mixer_without_mask"],
            "triton": ["HAS_TRITON", "has_kernels", "interprets", "on_device_of"],
        },
    )
