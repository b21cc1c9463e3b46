"""The arithmetic of a profile, on traces whose truth is known."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tests.refusals import refused

from plait.errors import TrainingError
from plait.profile.breakdown import Timeline, attribute_time, breakdown_of, read_trace
from plait.profile.count import Flops, SentMessage
from plait.profile.marks import CATEGORIES, COMMUNICATION, category_of_kernel, category_of_op
from plait.profile.page import draw_step
from plait.profile.report import folded, message_log, module_rows

MAIN, OTHER, BACKWARD, STREAM, SIDE = 1, 2, 3, 7, 8
Event = dict[str, Any]


def span(name: str, start: float, end: float, category: str = "cpu_op", lane: int = MAIN, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": lane, "args": args}


def mark(name: str, start: float, end: float, lane: int = MAIN) -> Event:
    return span(name, start, end, "user_annotation", lane)


def lanes(tmp_path: Path, *events: Event, until: float = 1000.0) -> Timeline:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [mark("ProfilerStep#4", 0.0, until), *events]}))
    return attribute_time(read_trace(path))


def milliseconds(found: Timeline) -> dict[str, float]:
    return {kind: round(use.ms * 1e3, 6) for kind, use in breakdown_of(found).kinds.items()}


def test_an_operator_has_the_time_that_its_parts_do_not_have(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        span("aten::silu", 100, 300),
        span("aten::mm", 150, 200),
        span("MmBackward0", 400, 500),
        span("aten::mm", 410, 490),
    )
    assert milliseconds(found) == {"matmul": 130.0, "elementwise": 150.0, "idle": 720.0}
    assert [(use.name, round(use.ms * 1e3), use.calls) for use in breakdown_of(found).operators] == [
        ("aten::silu", 150, 1),
        ("aten::mm", 130, 2),
    ]


def test_the_kinds_of_any_trace_add_up_to_the_whole_of_its_steps(tmp_path: Path) -> None:
    names = ["aten::mm", "aten::add", "aten::view", "c10d::allreduce_", "FSDP::all_gather", "aten::_flash_attention"]
    events = []
    for lane, category in ((MAIN, "cpu_op"), (STREAM, "kernel"), (SIDE, "gpu_memcpy")):
        at = random.uniform(-100, 50)
        while at < 1100:
            length = random.expovariate(1 / 20)
            events.append(span(random.choice([*names, "ncclKernel", "Memcpy HtoD"]), at, at + length, category, lane))
            if category == "cpu_op" and length > 5:
                events.append(span(random.choice(names), at + 1, at + length - 1))
            at += length + random.expovariate(1 / 10)
    events += [mark("data loading", 0, 13), mark("phase: forward", 20, 480), mark("phase: step", 700, 950)]
    for chosen in (events, [event for event in events if event["tid"] == MAIN]):
        account = breakdown_of(lanes(tmp_path, *chosen))
        assert sum(use.ms for use in account.kinds.values()) == pytest.approx(1.0)
        assert sum(sum(kinds.values()) for kinds in account.phases.values()) == pytest.approx(1.0)
        assert account.ms == pytest.approx(1.0)
        assert set(account.kinds) <= set(CATEGORIES)


def test_a_message_is_hidden_where_something_is_computed_beside_it(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        span("aten::mm", 100, 300),
        span("c10d::_allgather_base_", 300, 310),
        mark("gloo:all_gather", 200, 600, OTHER),
        span("aten::add", 500, 550),
    )
    # Alone from 300 to 500 and from 550 to 600.
    assert milliseconds(found) == {"matmul": 200.0, "elementwise": 50.0, COMMUNICATION: 250.0, "idle": 500.0}
    assert breakdown_of(found).hidden_ms == pytest.approx(0.150)


def test_a_message_from_another_rank_is_waited_for_and_never_hidden(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        span("c10d::recv_", 10, 20),
        mark("gloo:recv", 15, 500, OTHER),
        span("c10d::send", 30, 40),
        mark("gloo:send", 35, 1000, OTHER),
        span("aten::mm", 100, 300),
    )
    assert milliseconds(found) == {"matmul": 200.0, COMMUNICATION: 290.0, "idle": 510.0}
    assert breakdown_of(found).hidden_ms == 0
    sent = SentMessage("c10d::send", "send", "pp", 2, 4000, 4000.0, "forward")
    (row,) = message_log(found.trace, [sent]).rows
    assert (row.count, row.ms, row.gbps) == (1, None, None)


def test_waiting_inside_of_a_range_is_not_taken_for_copying(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        mark("FSDP::all_gather", 100, 400),
        span("fsdp::all_gather_copy_in", 100, 150),
        span("aten::copy_", 110, 140),
        span("c10d::_allgather_base_", 150, 160),
    )
    assert milliseconds(found) == {"packing": 50.0, COMMUNICATION: 10.0, "idle": 940.0}


def test_what_the_update_computes_is_the_optimizers_and_a_validation_is_one(tmp_path: Path) -> None:
    found = lanes(
        tmp_path,
        mark("phase: step", 100, 400),
        span("aten::mul", 100, 200),
        span("c10d::allreduce_", 200, 250),
        mark("validation", 500, 900),
        span("aten::mm", 600, 700),
        mark("gloo:all_reduce", 650, 850, OTHER),
    )
    assert milliseconds(found) == {"optimizer": 100.0, COMMUNICATION: 50.0, "evaluate": 400.0, "idle": 450.0}
    assert breakdown_of(found).hidden_ms == 0
    assert breakdown_of(found).phases["step"] == pytest.approx({"optimizer": 0.1, COMMUNICATION: 0.05, "idle": 0.15})


def device_trace(tmp_path: Path) -> Timeline:
    def launch(number: int, at: float, lane: int = MAIN) -> Event:
        return span("cudaLaunchKernel", at, at + 1, "cuda_runtime", lane, correlation=number)

    def ran(name: str, number: int, start: float, end: float, lane: int = STREAM, kind: str = "kernel") -> Event:
        return span(name, start, end, kind, lane, correlation=number)

    return lanes(
        tmp_path,
        mark("phase: forward", 10, 100),
        mark("module: blocks.0.ffn", 20, 60),
        span("aten::mm", 30, 50, **{"Sequence number": 5, "Fwd thread id": 0}),
        launch(1, 40),
        ran("some_kernel", 1, 200, 300),
        mark("phase: backward", 100, 200),
        span("autograd::engine::evaluate_function: MmBackward0", 110, 150, lane=BACKWARD),
        span("MmBackward0", 112, 148, lane=BACKWARD, **{"Sequence number": 5, "Fwd thread id": 1}),
        launch(2, 120, BACKWARD),
        ran("triton_poi_fused_add", 2, 300, 350),
        span("c10d::_reduce_scatter_base_", 151, 159, lane=BACKWARD),
        launch(3, 155, BACKWARD),
        ran("ncclDevKernel_ReduceScatter", 3, 320, 420, SIDE),
        mark("phase: step", 200, 300),
        launch(4, 210),
        ran("void multi_tensor_apply_kernel", 4, 450, 500),
        ran("Memcpy HtoD (Pinned -> Device)", 9, 490, 520, SIDE, "gpu_memcpy"),
    )


def test_kernels_belong_to_the_module_and_the_phase_that_launched_them(tmp_path: Path) -> None:
    found = device_trace(tmp_path)
    assert milliseconds(found) == {
        "matmul": 100.0,  # by its operator: the name says nothing
        "elementwise": 50.0,
        "optimizer": 50.0,
        COMMUNICATION: 70.0,
        "copies": 20.0,
        "idle": 710.0,
    }
    account = breakdown_of(found)
    assert account.hidden_ms == pytest.approx(0.030)
    # The backward operator is known by the number of the node that the forward one made.
    assert account.modules == {"blocks.0.ffn": pytest.approx({"forward": 0.1, "backward": 0.05})}


def test_messages_get_the_time_of_the_kernel_that_they_launched(tmp_path: Path) -> None:
    sent = SentMessage("c10d::_reduce_scatter_base_", "scatter", "dp_shard", 4, 4000, 3000.0, "backward")
    (row,) = message_log(device_trace(tmp_path).trace, [sent]).rows
    assert row.ms == pytest.approx(0.1)
    assert row.gbps == pytest.approx(3000 / 1e-4 / 1e9)
    log = message_log(device_trace(tmp_path).trace, [sent, sent])
    assert log.rows[0].ms is None
    assert re.findall(r"\d+", log.note) == ["2", "1"]


def test_the_picture_shows_every_lane_of_the_step(tmp_path: Path) -> None:
    picture = draw_step(device_trace(tmp_path))
    for words in ("whose time", "phase", "module", "stream 7", "stream 8", "blocks.0", "forward"):
        assert f">{words}<" in picture
    assert picture.count("<svg") == picture.count("</svg>") == 1


def test_blocks_that_differ_in_a_number_are_one_row_with_all_that_is_inside() -> None:
    layers = random.randint(2, 5)
    times = {f"blocks.{layer}.up": {"forward": 1.0, "backward": 2.0} for layer in range(layers)}
    flops = {name: Flops(10, 5, 20) for name in times} | {"head": Flops(7, 0, 14)}
    rows = module_rows("Net", times, flops)
    assert [(row.name, row.depth, len(row.names)) for row in rows] == [
        ("Net", 0, 1),
        ("blocks.*", 1, layers),
        ("blocks.*.up", 2, layers),
        ("head", 1, 1),
    ]
    assert rows[0].flops.total == 35 * layers + 21
    assert rows[1].ms == 3.0 * layers
    assert folded("layer1.0.conv2") == "layer1.*.conv2"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_192x192_64x4_2x1_v_bz_coopB_TNN", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("triton_red_fused_native_layer_norm_2", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("ncclDevKernel_AllGather_RING_LL", COMMUNICATION),
    ],
)
def test_kernels_are_known_by_their_names(kernel: str, kind: str) -> None:
    assert category_of_kernel(kernel, "kernel") == kind


def test_operators_that_compute_nothing_have_no_kind() -> None:
    for name in ("aten::view", "aten::empty_strided", "AddmmBackward0", "ProfilerStep#3", "module: head"):
        assert category_of_op(name) is None
    assert category_of_op("aten::convolution_backward") == "matmul"
    assert category_of_op("aten::_scaled_dot_product_flash_attention_for_cpu") == "attention"


def test_a_trace_without_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"traceEvents": [span("aten::mm", 0, 1)]}))
    with refused(TrainingError, path):
        read_trace(path)
