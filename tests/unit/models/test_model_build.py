from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.refusals import refused
from torch import nn

from plait.config.model import CustomModel, ImportedModel, ResNetConfig
from plait.config.part import GivenName
from plait.errors import ConfigError, ModelError
from plait.models import build_model, preset
from plait.models.common.protocol import Blocks, Initializable, LanguageModel

SMALL = [("gpt", "tiny"), ("llama", "tiny"), ("resnet", "cifar10"), ("hf", "tiny-llama")]


@pytest.mark.parametrize(("family", "name"), SMALL)
def test_every_family_builds_on_the_meta_device(family, name):
    with torch.device("meta"):
        model = build_model(preset(family, name))
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("family", "name"), SMALL)
def test_every_family_keeps_the_protocol(family, name):
    model = build_model(preset(family, name))
    assert isinstance(model, Blocks)
    assert isinstance(model, Initializable)
    assert isinstance(model, LanguageModel) == (family != "resnet")
    assert any(isinstance(module, model.block_classes) for module in model.modules())


@pytest.mark.parametrize(("family", "name"), [("llama", "tiny"), ("gpt", "tiny"), ("hf", "tiny-gpt2")])
def test_a_language_model_gives_logits_without_labels_and_a_loss_term_with_them(family, name):
    model = build_model(preset(family, name)).eval()
    tokens = torch.randint(256, (2, 12))
    labels = torch.randint(256, (2, 12))
    labels[0, :5] = -100
    assert model(tokens).shape == (2, 12, 256)
    loss = model(tokens, labels)
    expected = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.sum, expected)
    assert loss.count == 24 - 5


@pytest.mark.parametrize("size", ["1b", "3b", "8b", "70b"])
def test_llama_presets_have_the_size_of_their_name(size):
    with torch.device("meta"):
        model = build_model(preset("llama", size))
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert float(size[:-1]) * 0.95 < billions < float(size[:-1]) * 1.25


def test_gpt_small_has_the_124_million_parameters_of_gpt2():
    with torch.device("meta"):
        model = build_model(preset("gpt", "small"))
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_a_preset_can_be_changed():
    assert preset("resnet", "resnet50", classes=7) == ResNetConfig(depth=50, classes=7)


@pytest.mark.parametrize(("family", "name", "named"), [("lama", "1b", "llama"), ("llama", "2b", "3b")])
def test_an_unknown_preset_is_answered_with_the_known_ones(family, name, named):
    with refused(ModelError, family, named):
        preset(family, name)


def test_what_a_run_does_not_use_is_not_loaded():
    """The compiler for what is compiled, DTensor for what is sharded, transformers for its own models."""
    code = (
        "import sys, torch, plait; from plait.models import build_model, preset\n"
        "engine = plait.prepare(lambda: build_model(preset('gpt', 'tiny')), device='cpu')\n"
        "ids = torch.ones(1, 8, dtype=torch.int64); engine.train_step([{'input_ids': ids, 'labels': ids}])\n"
        "print({'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules))\n"
        "build_model(preset('llama', 'tiny')); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["set()", "False"]


@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {"heads": 5}), ("llama", {"kv_heads": 3}), ("gpt", {"heads": 7})]
)
def test_heads_that_do_not_divide_are_refused_by_name(family, changes):
    (key, value) = next(iter(changes.items()))
    with refused(ModelError, "model.dim", f"model.{key}={value}"):
        build_model(preset(family, "tiny", **changes))


def test_an_imported_model_is_called_with_its_arguments():
    model = build_model(ImportedModel(target="torch.nn:Linear", args={"in_features": 3, "out_features": 2}))
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (2, 3)


@pytest.mark.parametrize(
    ("target", "args", "key", "named"),
    [
        ("torch.nn:Linear", {"width": 3}, "model.args.width", "in_features"),
        ("torch.nn:Linear", {"in_features": 3}, "model.args", "model.args.out_features"),
        ("torch:__version__", {}, "model.target", "TorchVersion"),
        ("builtins:dict", {}, "model.target", "torch.nn.Module"),
    ],
)
def test_an_imported_model_that_cannot_be_made_says_why(target, args, key, named):
    with refused(ConfigError, f"'{target}'", named, key=key):
        build_model(ImportedModel(target=target, args=args))


def full():
    raise torch.OutOfMemoryError("no room")


def broken():
    raise ValueError("a width of 3")


def test_a_constructor_that_fails_is_named_and_one_without_memory_is_not_to_blame():
    with refused(ConfigError, ":broken'", "ValueError: a width of 3", "test_model_build.py", key="model"):
        build_model(CustomModel(type=f"{__name__}:broken"))
    with pytest.raises(torch.OutOfMemoryError):
        build_model(CustomModel(type=f"{__name__}:full"))


def test_a_module_is_no_description():
    with pytest.raises(ConfigError) as caught:
        build_model(CustomModel(type=GivenName(nn.Linear(2, 2))))
    assert caught.value.problems[0].path == "model.type"


def test_an_imported_model_that_cannot_be_imported_names_its_key():
    with refused(ConfigError, "no_such_package.models:Net", "'no_such_package'", key="model.target"):
        build_model(ImportedModel(target="no_such_package.models:Net"))
