"""When a model may be built without values, and when it must be built for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.refusals import refused
from torch import Tensor, nn

from plait.config import parse_sections
from plait.distributed import open_world
from plait.distributed.deferred_init import ConstructionRecord
from plait.distributed.materialize import Initializer, find_initializer, give_storage, initialize
from plait.engine import Preparation, prepare_native
from plait.errors import ModelError
from plait.models import build_model, preset

CPU = torch.device("cpu")


def on_meta(build: Callable[[], nn.Module]) -> tuple[nn.Module, Initializer | None]:
    with torch.device("meta"), ConstructionRecord() as built:
        model = build()
    return model, find_initializer(model, built)


def materialized(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    model, initializer = on_meta(build)
    assert initializer is not None
    with torch.no_grad():  # so that whatever is left out shows
        give_storage(model, CPU)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77)
    initialize(model, initializer, seed=seed, device=CPU)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.body = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 7)


class Xavier(Plain):
    """An initialisation of its own, in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.xavier_normal_(self.head.weight)


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight.mul_(0.1)


class Masked(nn.Linear):
    """A buffer made by more than one operation, that `reset_parameters` knows nothing of."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))


class OwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3))


class Loose(nn.Linear):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = torch.ones(4)


class Filled(Plain):
    """Weights that come from somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict({name: torch.zeros(value.shape) for name, value in self.state_dict().items()})

    def init_weights(self, module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


class Curious(Plain):
    """A constructor that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        assert float(self.head.weight.detach().abs().max()) < 1


class Partial(Plain):
    """The usual `init_weights`: some kinds of module, and the rest as torch makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
            nn.init.constant_(module.bias, 0.25)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("build", [Plain, Partial, Tied, Xavier, Scaled, Masked, OwnParameter])
def test_models_whose_values_can_be_made_again_may_be_built_without(build: type[nn.Module]) -> None:
    assert on_meta(build)[1] is not None


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter.*")
@pytest.mark.parametrize("build", [Loose, Filled])
def test_models_that_would_lose_values_are_built_for_real(build: type[nn.Module]) -> None:
    assert on_meta(build)[1] is None


@pytest.mark.parametrize("config", ["gpt", "llama", "resnet"])
def test_our_own_models_may_be_built_without_values(config: str) -> None:
    small: dict[str, Any] = {
        "gpt": {"type": "gpt", "vocab_size": 11, "dim": 8, "layers": 2, "heads": 2, "seq_len": 8},
        "llama": {"type": "llama", "vocab_size": 11, "dim": 8, "layers": 2, "heads": 2, "seq_len": 8},
        "resnet": {"type": "resnet", "depth": 18, "classes": 3, "stem": "cifar"},
    }
    section = parse_sections(model=small[config]).config.model
    assert section is not None
    tensors = materialized(lambda: build_model(section))
    assert not any(bool((t == 77).any()) for t in tensors.values())


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen", "tiny-gpt2"])
def test_transformers_models_may_be_built_without_values_and_get_all_of_them(name: str) -> None:
    pytest.importorskip("transformers")
    section = preset("hf", name)
    real = build_model(section)
    tensors = materialized(lambda: build_model(section))
    for key, tensor in {**dict(real.named_parameters()), **dict(real.named_buffers())}.items():
        assert tensors[key].shape == tensor.shape
        assert not (tensors[key] == 77).all(), key
        if "inv_freq" in key or tensor.ndim == 1:  # rotary tables, norms and biases have no chance in them
            assert torch.equal(tensors[key], tensor), key
        else:
            assert float(tensors[key].detach().std()) == pytest.approx(float(tensor.detach().std()), rel=0.25), key


def test_buffers_and_default_values_are_those_of_a_real_build() -> None:
    found = materialized(Plain)
    torch.manual_seed(0)
    for name, tensor in Plain().state_dict().items():
        if "weight" not in name and "bias" not in name:
            assert torch.equal(found[name], tensor), name
    assert torch.equal(found["body.1.running_var"], torch.ones(4))
    assert torch.equal(found["body.3.weight"], torch.ones(4))
    assert torch.equal(found["embedding.weight"][2], torch.zeros(4))  # the padding row
    assert 0 < float(found["head.weight"].detach().abs().max()) <= 0.5


def test_statistics_of_a_batch_norm_without_weights_are_set() -> None:
    found = materialized(lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False)))
    assert torch.equal(found["0.running_mean"], torch.zeros(3))
    assert torch.equal(found["0.running_var"], torch.ones(3))


def test_what_a_partial_init_weights_leaves_out_is_as_torch_makes_it() -> None:
    found = materialized(Partial)
    assert torch.equal(found["head.weight"], torch.full((7, 4), 0.5))
    assert torch.equal(found["body.3.weight"], torch.ones(4))
    assert torch.equal(found["body.1.running_var"], torch.ones(4))
    assert found["embedding.weight"].std() > 0.1


def test_tied_weights_stay_one_tensor_with_the_values_of_the_first() -> None:
    model, initializer = on_meta(Tied)
    assert initializer is not None
    give_storage(model, CPU)
    initialize(model, initializer, seed=3, device=CPU)
    assert isinstance(model, Tied)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.embedding.weight[2], torch.zeros(4))
    untied = materialized(Plain, seed=3)
    assert torch.equal(model.embedding.weight, untied["embedding.weight"])
    assert 0 < float(model.head.bias.detach().abs().max()) <= 0.5


def test_values_depend_on_seed_and_name_alone() -> None:
    first, again, other = materialized(Plain, 5), materialized(Plain, 5), materialized(Plain, 6)
    torch.manual_seed(99)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["head.weight"], other["head.weight"])

    class Longer(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.body.append(nn.Linear(4, 4))

    assert torch.equal(materialized(Longer, 5)["head.weight"], first["head.weight"])


class Exchanging(nn.Linear):
    """Gives its weight another storage, as many do."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.init_weights(self)

    def init_weights(self, module: nn.Module) -> None:
        nn.init.zeros_(self.weight)
        self.weight.data = torch.full_like(self.weight, 3.0)
        nn.init.ones_(self.bias)


def test_an_initializer_may_exchange_the_data_of_a_parameter() -> None:
    found = materialized(Exchanging)
    assert bool((found["weight"] == 3).all())
    assert bool((found["bias"] == 1).all())


def test_materializing_does_not_disturb_the_callers_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    materialized(Plain)
    assert torch.equal(torch.rand(3), expected)


# ---- what `prepare_native` makes of it


def prepared(model: Any, **strategy: Any) -> nn.Module:
    config = parse_sections(seed=7, strategy=strategy, device="cpu").config
    return prepare_native(Preparation(config, open_world(config), model=model)).model


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter.*")
@pytest.mark.parametrize("build", [Xavier, Scaled, Masked, OwnParameter, Loose, Filled, Curious])
def test_a_constructors_own_values_survive(build: type[nn.Module]) -> None:
    model = prepared(build)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    if isinstance(model, Masked):
        assert torch.equal(model.mask, torch.tril(torch.ones(4, 4)))
    if isinstance(model, Filled):
        assert not any(bool(p.any()) for p in model.parameters())


def test_a_model_built_for_real_starts_from_the_runs_seed() -> None:
    first = prepared(Loose)
    torch.manual_seed(123)
    second = prepared(Loose)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    "section",
    [
        {"type": "llama", "vocab_size": 11, "dim": 8, "layers": 2, "heads": 2, "seq_len": 8},
        {"type": "resnet", "depth": 18, "classes": 3, "stem": "cifar"},
    ],
)
def test_where_a_described_model_is_built_does_not_change_its_values(section: dict[str, Any]) -> None:
    states = []
    for meta_init in (True, False):
        config = parse_sections(seed=7, model=section, strategy={"meta_init": meta_init}, device="cpu").config
        states.append(prepare_native(Preparation(config, open_world(config))).state_tensors())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_model_object_keeps_its_values() -> None:
    torch.manual_seed(5)
    given = Plain()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    model = prepared(given)
    assert model is given
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_object_on_the_meta_device_gets_values() -> None:
    with torch.device("meta"):
        given = Plain()
    model = prepared(given)
    assert torch.equal(model.get_parameter("head.weight"), prepared(Plain).get_parameter("head.weight"))


def test_a_model_object_on_the_meta_device_that_nothing_can_fill_is_refused() -> None:
    with torch.device("meta"):
        given = OwnParameter()
    with refused(ModelError, "OwnParameter", "meta", "'table'", "reset_parameters", "init_weights(module)"):
        prepared(given)


def test_a_run_without_a_model_says_so() -> None:
    with refused(ModelError, "`model`"):
        prepared(None)


def test_stored_weights_of_a_transformers_folder_are_loaded(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    stored = build_model(preset("hf", "tiny-llama"))
    stored.save_pretrained(tmp_path)  # type: ignore[operator]
    for meta_init in (True, False):
        config = parse_sections(
            model={"type": "hf", "path": tmp_path}, strategy={"meta_init": meta_init}, device="cpu"
        ).config
        model = prepare_native(Preparation(config, open_world(config))).model
        for name, tensor in stored.named_parameters():
            assert torch.equal(model.get_parameter(name), tensor), name
