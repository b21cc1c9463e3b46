"""Small models with the habits that make sharding hard, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.models import LossTerm

DIM = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Net(nn.Module):
    """A regression; each target has a weight, and the count is their sum."""

    block_classes = (Layer,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(DIM, 1)

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x).squeeze(-1)
        return out

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        return LossTerm((weight * (self.predict(x) - y).square()).sum(), weight.sum())


class MeanNet(Net):
    """Answers with a plain mean, as most models do."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        return (self.predict(x) - y).square().mean()


class DictNet(Net):
    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        prediction = self.predict(x)
        return {"loss": (prediction - y).square().mean(), "prediction": prediction}


class AddingLayer(Layer):
    """Returns a view: what a linear layer makes of three dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(self.norm(x[None])).tanh())
        return out


class AddingNet(DictNet):
    """Adds to what its layers return, in place, and returns a view itself."""

    block_classes = (AddingLayer,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddingLayer() for _ in range(3))

    def predict(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            found = layer(x)
            found += x
            x = found[0]
        out: Tensor = self.head(x).squeeze(-1)
        return out


class BareNet(Net):
    """Knows nothing of losses."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        return self.predict(x)


def squared_error(prediction: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (prediction - batch["y"]).square().mean()


def weighted_error(prediction: Tensor, batch: dict[str, Tensor]) -> LossTerm:
    return LossTerm((batch["weight"] * (prediction - batch["y"]).square()).sum(), batch["weight"].sum())


class Lora(nn.Module):
    """A frozen linear layer and a small trained correction beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


class LoraNet(Net):
    """Frozen and trained parameters inside every layer; one layer and one bias frozen altogether."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.up = Lora(layer.up)  # type: ignore[assignment]
            layer.norm.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class SometimesNet(Net):
    """A branch in a layer and one at the root that only some batches take, and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].side = nn.Linear(DIM, DIM)
        self.side = nn.Linear(DIM, DIM)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, sideways: bool = False) -> Any:  # type: ignore[override]
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if sideways and index == 1:
                x = x + self.side(x)
        error = (self.head(x).squeeze(-1) - y).square()
        return LossTerm((weight * error).sum(), weight.sum())


class SideLayer(Layer):
    """A layer that leaves some of its own parameters out, as routed layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)
        self.sideways = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + self.side(x) if self.sideways else out


class SometimesInsideNet(Net):
    block_classes = (SideLayer,)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SideLayer() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, sideways: bool = False) -> Any:  # type: ignore[override]
        for layer in self.layers:
            layer.sideways = sideways  # type: ignore[assignment]
        return super().forward(x, y, weight)


class TiedNet(Net):
    """Head and embedding are one tensor, of two modules of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, DIM)
        self.unembedding = nn.Linear(DIM, 7, bias=False)
        self.unembedding.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        tokens = (y.abs() * 100).long() % 7
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        losses = nn.functional.cross_entropy(self.unembedding(hidden).float(), tokens, reduction="none")
        return LossTerm((weight * losses).sum() + 0.0 * self.head(hidden).sum(), weight.sum())


class RepeatNet(Net):
    """Its first layer comes again as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[0])


class ShareNet(Net):
    """Two layers have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up = self.layers[0].up


class LentNet(Net):
    """A module of its first layer is used before it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.layers[0].norm, nn.Linear(DIM, DIM))  # type: ignore[arg-type]

    def predict(self, x: Tensor) -> Tensor:
        return super().predict(self.first(x))


def rows(seed: int, count: int) -> dict[str, Tensor]:
    """Inputs, targets and weights, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(count, generator=generator) * (torch.rand(count, generator=generator) < 0.8)
    weight[0] = 1.0
    return {
        "x": torch.randn(count, DIM, generator=generator),
        "y": torch.randn(count, generator=generator),
        "weight": weight,
    }


def take(batch: dict[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {name: tensor[start:end] for name, tensor in batch.items()}


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class OwnStartNet(Net):
    """Initialises itself in its constructor, as most models do: nothing but that knows its first values."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.norm = OwnNorm()  # type: ignore[assignment]
        self.shift = nn.Parameter(0.02 * torch.randn(DIM))
        self.register_buffer("mask", torch.tril(torch.ones(DIM, DIM)))
        self.apply(self._fill)
        for name, param in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.trunc_normal_(param, std=0.005)

    def _fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def predict(self, x: Tensor) -> Tensor:
        return super().predict(x + self.shift)


def own_start_stack(width: int = DIM, layers: int = 4) -> nn.Module:
    """Layers in a row, filled when all are there."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    return model


class SkippingNet(Net):
    """Calls its second layer first, and the last one never."""

    def predict(self, x: Tensor) -> Tensor:
        for index in (1, 0):
            x = self.layers[index](x)
        out: Tensor = self.head(x).squeeze(-1)
        return out


class PenalizedNet(Net):
    """Goes backwards within its forward pass, twice: to move its inputs uphill, and to keep its slope small."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor) -> Any:
        x = x.detach().requires_grad_()
        (uphill,) = torch.autograd.grad((self.predict(x) - y).square().sum(), x)
        moved = (x + 0.1 * uphill.sign()).detach().requires_grad_()
        prediction = self.predict(moved)
        (slope,) = torch.autograd.grad(prediction.sum(), moved, create_graph=True)
        errors = (prediction - y).square() + slope.square().sum(-1)
        return LossTerm((weight * errors).sum(), weight.sum())
