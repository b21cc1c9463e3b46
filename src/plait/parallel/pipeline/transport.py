"""Activations and gradients on their way between ranks.

[Note: what will come]
A rank must know the shape of what it receives. It is not worked out beforehand: that would take a forward pass,
with the collectives of sharded parameters inside, at a moment when other replicas may see no new shape and take
no part. So the first time that inputs of some form come, each stage sends a description ahead of its activations;
both sides keep it under the form of the inputs, which they both know, and the next time it is not sent. Gradients
have the shapes of the activations.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import ModelError
from plait.torch_internals import TreeSpec, tree_flatten, tree_unflatten
from plait.world import wait_for


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """A tensor like it, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Form:
    """What a stage hands on: its structure, its tensors, and whatever else is in it, which must not change."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """The forms of its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def written(self) -> bytes:
        """The form as bytes, to be sent ahead of the tensors."""
        return pickle.dumps((tree_unflatten(range(len(self.leaves)), self.structure), self.leaves))

    @staticmethod
    def read(data: bytes) -> Form:
        """The form that `written` made bytes of."""
        skeleton, leaves = pickle.loads(data)  # noqa: S301  # from a rank of this run
        return Form(tree_flatten(skeleton)[1], leaves)

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The structure, with these tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorForm) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


def take_apart(output: Any) -> tuple[Form, list[Tensor]]:
    """The form of what a stage gave, and its tensors."""
    leaves, structure = tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if type(tensor).__name__ == "DTensor":
            raise ModelError(
                "a pipeline stage ends with a DTensor; between stages tensors must be plain, "
                "so the last layer of a stage has to give its local or its gathered output"
            )
    forms = tuple(
        TensorForm(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return Form(structure, forms), tensors


def form_of_inputs(inputs: Any) -> Hashable:
    """What the shapes of activations depend on: the structure of a micro-batch, its shapes, its plain values."""
    leaves, structure = tree_flatten(inputs)

    def form(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype
        if leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        return str(type(leaf))

    return str(structure), tuple(form(leaf) for leaf in leaves)


@dataclass(slots=True)
class Arrival:
    """Tensors that are on their way here."""

    form: Form
    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """The tensors, once they are here."""
        wait_for(self.works, "an exchange between pipeline stages")
        return self.tensors


class Transport:
    """Sends to and receives from the neighbours of this rank; see [Note: what will come]."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._device = device
        self._forms: dict[Hashable, Form] = {}
        self._alone = dist.get_backend(group) == "fake"  # in a world where no one else is there
        self.foretold: Form | None = None
        """Where this rank is alone: what comes from the others. Absent: what it hands on itself."""
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def send(self, form: Form, tensors: Sequence[Tensor], peer: int, key: Hashable) -> None:
        """Send what a stage gave. `key` is the stage and the form of the inputs, and known to the peer."""
        known = self._forms.get(key)
        if known is None:
            self._forms[key] = form
            if not self._alone:
                self._describe(form, peer)
        elif known != form:
            raise ModelError(
                f"for inputs of the same shapes a pipeline stage gave {_words(known)} before and now "
                f"{_words(form)}; what stages hand to each other may depend on the shapes of the inputs only"
            )
        self.send_tensors(tensors, peer)

    def send_tensors(self, tensors: Sequence[Tensor], peer: int) -> None:
        """Send tensors whose shapes the peer knows."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        for tensor in tensors:
            ready = _bytes_if_bool(tensor.detach().contiguous())
            if ready.numel():
                work = dist.isend(ready, group=self.group, group_dst=peer)
                assert work is not None
                self._sending.append((work, ready))

    def receive(self, peer: int, key: Hashable) -> Arrival:
        """Begin to receive what the peer sends under the same key."""
        if key not in self._forms:
            self._forms[key] = self._foretold() if self._alone else self._description(peer)
        form = self._forms[key]
        return self.receive_tensors(form, form.tensors, peer)

    def receive_tensors(self, form: Form, forms: Sequence[TensorForm], peer: int) -> Arrival:
        """Begin to receive tensors of known shapes."""
        tensors = [form.empty(self._device) for form in forms]
        works = []
        for tensor in tensors:
            if tensor.numel():
                work = dist.irecv(_bytes_if_bool(tensor), group=self.group, group_src=peer)
                assert work is not None
                works.append(work)
        return Arrival(form, tensors, works)

    @property
    def handed_on(self) -> Form | None:
        """The form of what this rank sends or receives, where it has done so."""
        return next(iter(self._forms.values()), None)

    def _foretold(self) -> Form:
        form = self.foretold or self.handed_on
        assert form is not None, "a rank that is alone must be told what it receives"
        return form

    def finish(self) -> None:
        """Wait until everything was sent."""
        wait_for((work for work, _ in self._sending), "an exchange between pipeline stages")
        self._sending.clear()

    def _describe(self, form: Form, peer: int) -> None:
        text = torch.frombuffer(bytearray(form.written()), dtype=torch.uint8).to(self._device)
        self.send_tensors([torch.tensor([text.numel()], device=self._device), text], peer)

    def _description(self, peer: int) -> Form:
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._fetch(length, peer)
        text = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._fetch(text, peer)
        return Form.read(text.cpu().numpy().tobytes())

    def _fetch(self, tensor: Tensor, peer: int) -> None:
        work = dist.irecv(tensor, group=self.group, group_src=peer)
        wait_for([work], "an exchange of forms between pipeline stages")


def _bytes_if_bool(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def _words(form: Form) -> str:
    return ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, TensorForm) else repr(leaf)
        for leaf in form.leaves
    )
