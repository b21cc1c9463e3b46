from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from plait.models import build_model, preset
from plait.models.resnet import load_pretrained

PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PARAMETERS)
def test_parameters_are_as_many_as_published(depth):
    with torch.device("meta"):
        model = build_model(preset("resnet", f"resnet{depth}"))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[depth]


def test_names_are_those_of_torchvision():
    with torch.device("meta"):
        names = build_model(preset("resnet", "resnet50")).state_dict().keys()
    expected = (
        "conv1.weight bn1.running_mean layer1.0.conv1.weight layer1.0.bn3.bias layer1.0.downsample.0.weight "
        "layer1.0.downsample.1.num_batches_tracked layer3.5.conv2.weight layer4.2.bn3.running_var fc.weight fc.bias"
    )
    assert set(expected.split()) <= names
    assert len(names) == 320
    assert "layer1.1.downsample.0.weight" not in names


def test_labels_add_the_loss_to_the_logits():
    model = build_model(preset("resnet", "cifar10")).eval()
    image, label = torch.randn(3, 3, 32, 32), torch.tensor([1, 9, 4])
    answer = model(image, label)
    assert torch.equal(answer["logits"], model(image))
    torch.testing.assert_close(answer["loss"].sum, F.cross_entropy(answer["logits"], label, reduction="sum"))
    assert answer["loss"].count == 3


@pytest.mark.parametrize(("stem", "size"), [("imagenet", (1, 64, 2, 2)), ("cifar", (1, 64, 8, 8))])
def test_the_cifar_stem_keeps_small_images_large(stem, size):
    model = build_model(preset("resnet", "resnet18", stem=stem)).eval()
    seen = []
    model.layer1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    model(torch.randn(1, 3, 8, 8))
    assert seen == [size]


def test_every_parameter_learns_after_the_first_step():
    model = build_model(preset("resnet", "cifar10"))
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.ones_(norm.weight)  # those at zero hide what lies behind them, at first
    model(torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3]))["loss"].sum.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_stored_weights_can_be_read_back(tmp_path, put):
    source, model = (build_model(preset("resnet", "cifar10")) for _ in range(2))
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    load_pretrained(model, tmp_path, put(model))
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(image), source.eval()(image))
