"""Whatever is written with DeepSpeed's words is translated, or is an error that names a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config import check, parse
from plait.errors import ConfigError
from plait.frontends.deepspeed.config import translate
from plait.frontends.deepspeed.config.autotuning import AUTOTUNING
from plait.frontends.deepspeed.config.optimizer import SCHEDULER_TYPES as SCHEDULES
from plait.frontends.deepspeed.config.optimizer import TYPES as OPTIMIZERS
from plait.frontends.deepspeed.config.precision import FP16
from plait.frontends.deepspeed.config.translate import KEYS
from plait.frontends.deepspeed.config.zero import STAGES

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2000)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "fp16", "O1", ""]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "type", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
FLAG = st.booleans() | st.just("auto")
SIZE = st.integers(1, 64) | st.sampled_from([2e8, "auto", 0])
DEVICE = st.fixed_dictionaries(
    {"device": st.sampled_from(["none", "cpu", "nvme"])},
    optional={"nvme_path": st.sampled_from(["/a", "/b"]), "ratio": st.floats(0, 1), "pin_memory": FLAG},
)


def some(table: Any, value: Any) -> Any:
    return st.dictionaries(st.sampled_from(sorted(table)), value, max_size=4)


LIKELY: dict[str, Any] = {
    "train_batch_size": SIZE,
    "train_micro_batch_size_per_gpu": SIZE,
    "gradient_accumulation_steps": SIZE,
    "gradient_clipping": st.floats(0, 2),
    "communication_data_type": st.sampled_from(["fp16", "bf16", "fp32"]),
    "fp16": st.fixed_dictionaries({"enabled": FLAG}, optional={"loss_scale": st.integers(0, 8), "hysteresis": SIZE}),
    "bf16": st.fixed_dictionaries({"enabled": FLAG}, optional={"bf16_master_weights_and_grads": FLAG}),
    "amp": st.fixed_dictionaries({"enabled": FLAG}, optional={"opt_level": st.sampled_from(["O0", "O1", "O2", "O3"])}),
    "optimizer": st.sampled_from([*OPTIMIZERS, "OneBitAdam"]).flatmap(
        lambda kind: st.fixed_dictionaries(
            {"type": st.just(kind)},
            optional={"params": some(OPTIMIZERS[kind].table if kind in OPTIMIZERS else ["lr"], st.floats(0, 1) | FLAG)},
        )
    ),
    "scheduler": st.sampled_from(sorted(SCHEDULES)).flatmap(
        lambda kind: st.fixed_dictionaries({"type": st.just(kind), "params": some(SCHEDULES[kind], SIZE | FLAG)})
    ),
    "zero_optimization": st.fixed_dictionaries(
        {"stage": st.integers(0, 4)},
        optional={
            "offload_optimizer": DEVICE,
            "offload_param": DEVICE,
            "cpu_offload": FLAG,
            "zero_hpz_partition_size": SIZE,
            "mics_shard_size": SIZE,
            **dict.fromkeys(sorted(STAGES)[:12], SIZE | FLAG),
        },
    ),
    "tensor_parallel": st.fixed_dictionaries({"autotp_size": SIZE}),
    "tensorboard": st.fixed_dictionaries({"enabled": FLAG}),
    "wandb": st.fixed_dictionaries({"enabled": FLAG}, optional={"project": st.just("p")}),
    "compile": st.fixed_dictionaries({"deepcompile": FLAG}),
    "checkpoint": st.fixed_dictionaries(
        {}, optional={"use_node_local_storage": FLAG, "writer": some(["decoupled"], FLAG)}
    ),
}
SENSIBLE = st.fixed_dictionaries({}, optional=LIKELY)
WILD = st.dictionaries(st.sampled_from(sorted(KEYS)), ANYTHING, max_size=4) | st.fixed_dictionaries(
    {},
    optional={
        "zero_optimization": some(STAGES, ANYTHING),
        "fp16": some(FP16, ANYTHING),
        "autotuning": some(sorted(AUTOTUNING), ANYTHING),
        "optimizer": st.fixed_dictionaries(
            {"type": ANYTHING | st.just("Adam"), "params": some(["lr", "betas"], ANYTHING)}
        ),
        "scheduler": st.fixed_dictionaries({"type": ANYTHING | st.just("WarmupLR"), "params": ANYTHING}),
    },
)


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Every dotted key that holds a value rather than a section."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, each in value.items():
        yield from leaves(each, f"{path}.{key}" if path else key)


def outcome(config: dict[str, Any], world_size: int | None) -> None:
    """A description that parses and breaks no rule, or an error that names a key that is there."""
    try:
        found = translate(config, world_size=world_size)
    except ConfigError as error:
        names = {problem.path.split(".")[0] for problem in error.problems}
        assert names <= {*config, *KEYS}, names
        return
    if not config:
        return
    check(parse(found.sections).config, has_val=False, require_length=False)
    answered = {entry.key for entry in found.report.entries}
    dropped = [path for path in leaves(config) if not any(f"{path}.".startswith(f"{key}.") for key in answered)]
    assert not dropped


@settings(max_examples=250)
@given(config=SENSIBLE, world_size=st.none() | st.integers(1, 8))
def test_likely_configurations_translate_or_name_a_key(config: dict[str, Any], world_size: int | None) -> None:
    outcome(config, world_size)


@settings(max_examples=250)
@given(config=WILD)
def test_wild_configurations_translate_or_name_a_key(config: dict[str, Any]) -> None:
    outcome(config, None)
