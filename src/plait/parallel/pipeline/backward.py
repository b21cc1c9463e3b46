"""The backward pass of one stage, whole or in two halves.

[Note: two halves of a backward pass]
Zero-bubble schedules fill gaps with work that nobody waits for: gradients of weights. The first half finds the
gradients of the stage's inputs, and remembers what arrives at every point of the graph where a path to weights
branches off; torch knows how to find these points. The second half starts from them. It goes through autograd's
accumulation, so hooks on gradients see them as in any backward pass.

A stage that recomputes its activations would recompute them for each branch of the second half anew, and one that
is compiled has no branches. Both should run the whole pass at once (`schedule.merge_backward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Branches = list[dict[str, Any]]
"""Points where paths to weights branch off, with what arrived there."""


class Graph:
    """What one stage keeps of one micro-batch between its forward and backward passes."""

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.inputs = list(inputs)
        """The tensors from the stage before that need gradients."""
        # The values of the outputs are not needed, only their place in the graph.
        self._outputs = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
        self._gradients: Sequence[Tensor] = ()
        self._branches: Branches = []

    def run(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The whole pass: gradients of the parameters are accumulated, those of the inputs are the answer.

        `gradients` are those of the outputs, as far as they have any.
        """
        if self._outputs:
            torch.autograd.backward(self._outputs, grad_tensors=gradients)
        self._outputs = []
        return [_taken(tensor) for tensor in self.inputs]

    def run_inputs(self, gradients: Sequence[Tensor], module: nn.Module) -> list[Tensor]:
        """The first half; see [Note: two halves of a backward pass]."""
        if not self.inputs:  # nobody waits: all of it is left for the second half
            self._gradients = gradients
            return []
        found: Sequence[Tensor | None] = [None] * len(self.inputs)
        if self._outputs:
            self._branches = _find_branches(self._outputs, self.inputs, module)
            hooks = [hook for branch in self._branches for hook in _remember(branch)]
            try:
                found = torch.autograd.grad(self._outputs, self.inputs, gradients, retain_graph=True, allow_unused=True)
            finally:
                for hook in hooks:
                    hook.remove()
        self._outputs = []
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(self.inputs, found, strict=True)
        ]

    def run_weights(self) -> None:
        """The second half: gradients of the weights; see [Note: two halves of a backward pass]."""
        if not self.inputs:
            self.run(self._gradients)
            return
        while self._branches:
            _accumulate(self._branches.pop())


def _find_branches(outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], module: nn.Module) -> Branches:
    from plait.torch_internals import construct_reverse_graph, get_param_groups

    weights = [get_gradient_edge(p).node for p in module.parameters() if p.requires_grad]
    graph = construct_reverse_graph([edge.node for edge in outputs])
    branches: Branches = get_param_groups([get_gradient_edge(t).node for t in inputs], weights, graph)
    for branch in branches:
        branch["intermediates"] = list(branch["intermediates"])
        branch["grads"] = [None] * len(branch["intermediates"])
    return branches


def _remember(branch: dict[str, Any]) -> Iterator[Any]:
    """Hooks that note what arrives."""

    def note(arrived: tuple[Tensor | None, ...], index: int) -> None:
        branch["grads"][index] = arrived

    for index, node in enumerate(branch["intermediates"]):
        yield node.register_prehook(lambda arrived, index=index: note(arrived, index))


def _taken(tensor: Tensor) -> Tensor:
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if gradient is None else gradient


def _accumulate(branch: dict[str, Any]) -> None:
    nodes: list[Node] = branch["intermediates"]
    edges, gradients, hooks = [], [], []
    for node, given in zip(nodes, branch["grads"], strict=True):
        for index, gradient in enumerate(given or ()):
            if gradient is not None:
                edges.append(GradientEdge(node, index))
                gradients.append(gradient)
        if len(nodes) > 1 and given is not None:
            # One of these points may lie behind another. What arrived there has all of it already.
            hooks.append(node.register_prehook(lambda _again, given=given: given))
    weights = [node.variable for node in branch["params"]]
    try:
        if edges:
            torch.autograd.backward(edges, gradients, inputs=weights)
    finally:
        for hook in hooks:
            hook.remove()
