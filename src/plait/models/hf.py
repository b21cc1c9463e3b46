"""Models of `transformers`, given the methods of `models.common.protocol`.

The model is not wrapped: its class is replaced by a subclass, as `fully_shard` does. So every parameter keeps the name
that it has in `transformers`, a checkpoint is a `transformers` checkpoint, and `save_pretrained`, `generate` and `peft`
work on it.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plait.config import HFConfig, read_json_object, transformers_code
from plait.distributed import current_documents, is_sharded, mask_functions_of, prepare_mixers, with_documents
from plait.errors import MissingExtraError, ModelError, PlaitError
from plait.kernels import apply_rotary, rms_norm
from plait.models.common.attention import document_mask
from plait.models.common.counts import active_params
from plait.models.common.losses import PLAIN_BYTES, Fp8Head, cross_entropy, linear_cross_entropy
from plait.models.common.protocol import LossTerm
from plait.models.common.weights import (
    Conversions,
    Made,
    Put,
    Reading,
    Wanted,
    are_unchanged,
    same,
    stream_groups,
    unique_tensors,
)
from plait.models.hf_tasks import TASKS
from plait.precision import apply_linears, are_fusable, feed_forward
from plait.torch_internals import forward_hooks
from plait.transformers_internals import (
    WeightGroup,
    attn_implementation,
    groups_to_load,
    groups_to_store,
    init_weights,
    initializes,
    may_be_missing,
    may_be_unexpected,
    no_split_modules,
    not_stored,
    setting,
    taken_for_initialized,
    tied_names,
)


def find_block_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes in the model's `_no_split_modules`; if there are none, those in its longest `ModuleList`.

    The class of a module that contains the input embedding is left out: it is not a repeated block, and a tied head
    uses the embedding's parameter, so both must belong to the root module.
    """
    named = no_split_modules(model)
    embedding = _input_embedding(model)
    classes = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__ in named)
    for module in model.modules() if embedding is not None else ():
        if type(module) in classes and any(child is embedding for child in module.modules()):
            del classes[type(module)]
    if not classes:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        classes = dict.fromkeys(type(module) for module in max(lists, key=len, default=()))
    return tuple(classes)


def _input_embedding(model: Any) -> nn.Module | None:
    """Return the module that embeds a model's inputs; None if `transformers` does not know it, as for two encoders."""
    try:
        embedding: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embedding


# Fused norms, gated feed-forwards and attentions for Llama, Mistral and Qwen of `transformers`.
#
# A module's class is replaced by a subclass. The attention of `transformers` finds the rotary function among the
# globals of its file. To replace that function for one model only, the subclass has a copy of `forward` with other
# globals. This copy is called with a proxy of the module, whose projections of queries, keys and values return results
# that were computed together beforehand.


_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROTATION = "apply_rotary_pos_emb"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class _HFRMSNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        module: Any = self
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)


class _Gated(nn.Module):
    together: ClassVar[tuple[tuple[str, ...], ...]] = (("gate_proj", "up_proj"), ("down_proj",))

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        return feed_forward(x, module.gate_proj, module.up_proj, module.down_proj)


class _Projected:
    """A proxy of an attention for one call: its projections return tensors that are already computed.

    All other attributes are those of the module.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self._module = module
        # A tensor is removed from the dict when it is returned, so that its memory is not kept.
        known = dict(
            zip(_PROJECTIONS, apply_linears(x, [module.get_submodule(name) for name in _PROJECTIONS]), strict=True)
        )
        self.q_proj, self.k_proj, self.v_proj = (partial(_answer, known, name) for name in _PROJECTIONS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _answer(known: dict[str, Tensor], name: str, _: Tensor) -> Tensor:
    return known.pop(name)


_MODULE_NAMES: Mapping[str, str] = MappingProxyType({"RMSNorm": "norms", "MLP": "gates", "Attention": "attentions"})


def fuse_transformers(model: nn.Module) -> Counter[str]:
    """Replace the modules that have fused forms; return the number of replaced modules of each kind."""
    counts: Counter[str] = Counter()
    classes: dict[type[nn.Module], type[nn.Module] | None] = {}
    for module in model.modules():
        original = type(module)
        suffix = _module_kind(original)
        if suffix is None or (suffix == "MLP" and not _is_silu(module)):
            continue
        if original not in classes:
            classes[original] = _extended(original, suffix)
        fused = classes[original]
        if fused is not None:
            module.__class__ = fused
            counts[_MODULE_NAMES[suffix]] += 1
    return counts


def _module_kind(cls: type[nn.Module]) -> str | None:
    """Return the suffix of a class's name if it is a norm, feed-forward or attention of a known family, else None."""
    path = cls.__module__.split(".")
    if path[:2] != ["transformers", "models"] or path[2] not in _FAMILIES:
        return None
    return next((suffix for suffix in _MODULE_NAMES if cls.__name__.lower() == f"{path[2]}{suffix}".lower()), None)


def _is_silu(module: Any) -> bool:
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _extended(original: type[nn.Module], suffix: str) -> type[nn.Module] | None:
    members: dict[str, object] = {"__module__": original.__module__}
    if suffix == "Attention":
        forward = original.forward
        if not isinstance(forward, FunctionType) or forward.__closure__ or _ROTATION not in forward.__code__.co_names:
            return None  # another release of `transformers`, whose attention is written differently
        members["forward"] = copy = _with_rotation(forward)
        if set(_PROJECTIONS) <= set(forward.__code__.co_names) and forward.__code__.co_varnames[1] == "hidden_states":
            members |= {"forward": _with_projections(copy), "together": (_PROJECTIONS,)}
        return type(original.__name__, (original,), members)
    return type(original.__name__, ({"RMSNorm": _HFRMSNorm, "MLP": _Gated}[suffix], original), members)


def _with_rotation(forward: FunctionType) -> FunctionType:
    """Return a copy of a function whose globals have the fused rotary function."""
    names = {**forward.__globals__, _ROTATION: _rotation(forward.__globals__[_ROTATION])}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _with_projections(forward: FunctionType) -> Callable[..., Any]:
    """Return a forward that computes all projections by one autograd function, if they allow that."""

    @wraps(forward)
    def together(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        at_once = are_fusable([self.get_submodule(name) for name in _PROJECTIONS])
        return forward(_Projected(self, hidden_states) if at_once else self, hidden_states, *args, **kwargs)

    return together


def _rotation(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def together(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.ndim != 3 or cos.shape[-1] != q.shape[-1]:
            return original(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return apply_rotary(q, k, cos, sin)

    return together


# The head of a `transformers` decoder computes the loss itself where the tensor of all logits would be too large.
#
# [Note: a loss without logits] A model of `transformers` computes all logits, and from these the loss. Here, the
# head's `forward` is replaced for one call of the model by a function that computes the loss from the hidden states, in
# chunks of tokens; see [Note: chunked loss] in `models.common.losses`. The model still calls the head itself, so hooks
# on it (such as one that gathers its weight) run as before. This is correct only if the model returns the head's output
# unchanged. That is tested once, when the model is built: everything before the head is replaced by a stub, and the
# output of the model compared with that of the head.


def returns_head_output(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a decoder's own `forward` returns the output of its head unchanged; False where that is unknown."""
    head, body = head_of(model), _body_of(model)
    if head is None or body is None or head.bias is not None:
        return False
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

    # Any sizes will do, because no layer is computed.
    answer = torch.zeros(1, 1, 1, device="cpu")
    before = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=torch.zeros(1, 1, 1, device="cpu"))
    before.router_logits = None
    with _forward_replaced(body, lambda *_, **__: before), _forward_replaced(head, lambda *_, **__: answer):
        try:
            output = forward(model, torch.zeros(1, 1, dtype=torch.long, device="cpu"), return_dict=True)
        except Exception:  # it reads an output of the layers that the stub does not have
            return False
    return getattr(output, "logits", None) is answer


def are_many(model: nn.Module, labels: Tensor, fp8: Fp8Head | None) -> bool:
    """Whether the head should and can compute the loss itself: if the logits are large, or always with `fp8`."""
    head = head_of(model)
    if head is None or is_sharded(head.weight) or torch.compiler.is_compiling():
        return False
    if "forward" in vars(head) or any(forward_hooks(head)):
        return False  # the head has a hook or a replaced `forward`
    return fp8 is not None or labels.numel() * head.out_features * head.weight.element_size() > PLAIN_BYTES


@contextmanager
def loss_at_the_head(model: nn.Module, labels: Tensor, fp8: Fp8Head | None) -> Iterator[list[LossTerm]]:
    """Return a context in which the head returns the sum of the losses instead of logits.

    Its value is a list, to which the `LossTerm` is appended when the head is called.
    """
    head = head_of(model)
    assert head is not None
    losses: list[LossTerm] = []

    def finish(hidden: Tensor) -> Tensor:
        losses.append(linear_cross_entropy(hidden, head.weight, labels, fp8=fp8))
        return losses[-1].sum

    with _forward_replaced(head, finish):
        yield losses


def head_of(model: Any) -> nn.Linear | None:
    """Return the head of a `transformers` model; None if it has none, or it is not exactly an `nn.Linear`."""
    head = model.get_output_embeddings()
    return head if type(head) is nn.Linear else None


def _body_of(model: Any) -> nn.Module | None:
    body = getattr(model, model.base_model_prefix, None)
    return body if isinstance(body, nn.Module) else None


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


# Documents that share a row.
#
# [Note: documents in a row] Attention separates documents by its mask. Where every layer attends to the whole row, one
# mask of pairs of tokens is passed to the model, and used by all its layers. Windows and chunks have masks of their
# own, which the model makes by functions of `transformers` from the registered mask function of its attention. That
# function is replaced by one that also asks the documents of the model that is being called. What mixes tokens without
# a mask gets the documents itself: see [Note: a mixer and its documents], `distributed/mixers.py`.


_DOCUMENT_ATTENTIONS = ("sdpa", "eager", "flex_attention")
"""Implementations of attention whose masks separate documents."""
_GLOBAL_MASKS = frozenset({"create_causal_mask", "create_recurrent_attention_mask"})
"""Functions of `transformers` for the masks of layers that see the whole row, or that see no mask of pairs."""
_LOCAL_MASKS: Mapping[str, str] = MappingProxyType(
    {"create_sliding_window_causal_mask": "sliding_window", "create_chunked_causal_mask": "attention_chunk_size"}
)
"""Functions for layers that see a part of it, and the key of the config with the length of that part."""


def _is_positional(module: nn.Module) -> bool:
    names = (type(module).__name__, *(name for name, _ in module.named_children()))
    return any(re.search(r"position|rotary|\bwpe\b", name, re.IGNORECASE) for name in names)


def _first_position(module: nn.Module) -> int:
    """Return the row of a table of positions at which a module begins to count."""
    table = getattr(module, "position_embeddings", None)
    padding = table.padding_idx if isinstance(table, nn.Embedding) else None
    return 0 if padding is None else padding + 1


def _is_alibi(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "alibi" in code.co_varnames


class _DocumentMask:
    """A registered mask function of `transformers`: the original one, within the documents of the model's rows."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, *, mask_function: Callable[..., Any] | None = None, **options: Any) -> Any:
        from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

        made = causal_mask_function if mask_function is None else mask_function
        documents = current_documents()
        if documents is not None:
            made = and_masks(made, packed_sequence_mask_function(documents.ids))
            options["allow_is_causal_skip"] = False
        return self._original(mask_function=made, **options)


def separate_documents(implementation: str) -> None:
    """Make the masks of an attention separate the documents of the model that is being called."""
    from transformers import AttentionMaskInterface

    registered: Any = AttentionMaskInterface()[implementation]  # type: ignore[no-untyped-call]
    if not isinstance(registered, _DocumentMask):
        AttentionMaskInterface.register(implementation, _DocumentMask(registered))


def build_hf_model(config: HFConfig, *, trust_code: bool = False) -> nn.Module:
    """Return the model that `config` describes, with random weights; `load_pretrained` loads stored ones.

    Parameters have torch's default dtype whatever the stored config says: the run's settings determine the precision.
    Raise a `ModelError` if `transformers` cannot build it.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "model.type: hf", "hf") from error
    causal = config.task == "causal-lm"
    task = None if causal else TASKS[config.task]
    auto = getattr(transformers, "AutoModelForCausalLM" if task is None else task.auto)
    source, key = (config.config or {}, "model.config") if config.path is None else (config.path, "model.path")
    try:
        with transformers_code(source, trust_code=trust_code, key=key) as trusted:
            described = hf_config(config, trust_code=trusted)
            # For DeiT the Auto class iterates over them, also where there are none.
            described.architectures = described.architectures or []
            model: nn.Module = auto.from_config(described, dtype=torch.get_default_dtype(), trust_remote_code=trusted)
    except PlaitError:
        raise
    except Exception as error:  # an invalid value raises whatever error it causes in a layer
        raise ModelError(
            f"transformers cannot build {key}={source!r:.200} for model.task={config.task!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if causal and getattr(described, "attn_type", None) == "bi":
        raise ModelError(
            f"model.config.attn_type='bi': the attention of a {described.model_type!r} model sees the tokens that "
            "model.task='causal-lm' predicts, and it learns from permutations of them, which Plait does not make"
        )
    if causal and _attends_in_both_directions(model):
        raise ModelError(
            f"model.config.is_decoder=False: a {described.model_type!r} model is an encoder then, whose attention sees "
            "the tokens that model.task='causal-lm' predicts; set is_decoder: true in the model's config"
        )
    return adapt(model, CausalLM if task is None else HFMethods, task.adapter if task else None)


def _attends_in_both_directions(model: Any) -> bool:
    """Whether attention sees later tokens: an encoder that is not configured as a decoder."""
    text = model.config.get_text_config()
    if getattr(text, "is_decoder", None) is not False or getattr(text, "is_encoder_decoder", False):
        return False
    causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    is_masked_lm = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING
    return not any(causal) and (bool(causal) or is_masked_lm)


def adapt(model: nn.Module, adapter: type[HFMethods], task: type[nn.Module] | None = None) -> nn.Module:
    """Make `adapter`, and `task` if given, base classes of one `transformers` model's class, in place.

    Return the model.
    """
    if issubclass(adapter, CausalLM):
        prepare_mixers(model)
    original = type(model)
    members: dict[str, object] = {
        "__module__": original.__module__,
        "block_classes": find_block_classes(model),
        "accepts": frozenset(inspect.signature(original.forward).parameters),
    }
    if issubclass(adapter, CausalLM):
        members["tiles_loss"] = returns_head_output(model, original.forward)
        members["mask_functions"] = mask_functions_of(model)
        members["reads_mask"] = any(map(_is_alibi, model.modules()))
        members["first_position"] = max(map(_first_position, model.modules()))
        members["counts_positions"] = any(map(_is_positional, model.modules()))
    bases = (adapter, original) if task is None else (task, adapter, original)
    model.__class__ = type(original.__name__, bases, members)
    return model


class HFMethods(nn.Module):
    """The methods of Plait's protocol that every adapted model gets."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    initializes_last: ClassVar[bool] = True
    """The constructor ends with `init_weights`, except on the meta device: it overwrites what the constructor set."""
    accepts: ClassVar[frozenset[str]]
    """The names of the arguments of the model's original `forward`."""

    def init_weights(self, module: nn.Module | None = None) -> None:
        """Initialize the direct parameters and buffers of one module, as `transformers` would.

        In `transformers`, the initialization of some modules also changes their children: GPT-2's, for example, scales
        the residual projections. So this applies the initialization of all ancestors of the module too, the innermost
        first, as `transformers` does. Meanwhile all tensors of other modules are marked as initialized, by the flag of
        `transformers`, so that they do not change. Without a module, this is the method of `transformers`, which
        initializes the whole model.
        """
        if module is None:
            super().init_weights()  # type: ignore[misc]
            return
        direct = {id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        others = [t for t in (*self.parameters(), *self.buffers()) if id(t) not in direct]
        with taken_for_initialized(others):
            for owner, holder in reversed(_owners_of(self, module)):
                init_weights(owner, holder)

    def flops_per_token(self, seq_len: int) -> float:
        """Return 6 FLOPs per parameter that a token uses; attention, which differs, is not counted."""
        return 6.0 * active_params(self)


class CausalLM(HFMethods):
    """A decoder: its forward pass takes Plait's batch, and returns a `LossTerm` or logits."""

    tiles_loss: ClassVar[bool]
    """Whether the head can compute the loss; see [Note: a loss without logits]."""
    mask_functions: ClassVar[frozenset[str]]
    """The names of the functions of `transformers` by which its forward pass makes masks."""
    reads_mask: ClassVar[bool]
    """Whether it computes biases of attention (ALiBi) from a mask of tokens."""
    counts_positions: ClassVar[bool]
    """Whether something in the model depends on the positions of tokens."""
    first_position: ClassVar[int]
    """The position of the first token of a row: in RoBERTa, the one after the position of padding."""
    fp8_head: Fp8Head | None = None
    """Set where the loss computes its gradients in 8 bits."""
    takes_sharded_logits = True
    """Whether the loss is computed from logits that may be sharded over tensor-parallel ranks."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss if labels are given (already shifted), else the logits.

        Other keywords are passed to the forward pass of `transformers`. With `return_dict`, which its `generate`
        passes, this returns what `transformers` returns.
        """
        if "return_dict" in kwargs:
            self.takes_sharded_logits = labels is None  # with labels, transformers computes the loss
            try:
                return super().forward(input_ids, labels=labels, **kwargs)
            finally:
                self.takes_sharded_logits = True
        if positions is not None and ("position_ids" in self.accepts or self.counts_positions):
            self._require("position_ids", "positions")
            kwargs["position_ids"] = positions + self.first_position
        if document_ids is not None:
            kwargs = self._with_documents(document_ids, kwargs)
        config: Any = self.config
        if "use_cache" in self.accepts or ("kwargs" in self.accepts and hasattr(config, "use_cache")):
            kwargs["use_cache"] = False  # a forward without this argument passes it on
        if labels is not None and self.tiles_loss and are_many(self, labels, self.fp8_head):
            with loss_at_the_head(self, labels, self.fp8_head) as losses:
                output = super().forward(input_ids, return_dict=True, **kwargs)
            (loss,) = losses
        else:
            output = super().forward(input_ids, return_dict=True, **kwargs)
            if labels is None:
                return output.logits
            loss = cross_entropy(output.logits, labels)
        balance = getattr(output, "aux_loss", None)
        if balance is None:
            return loss
        # The balance loss of a mixture of experts is a mean; times the count it is a sum, as the loss is.
        weight: Any = self.router_aux_loss_coef
        return LossTerm(loss.sum + weight * balance * loss.count, loss.count)

    def _require(self, parameter: str, given: str) -> None:
        if parameter not in self.accepts:
            raise ModelError(
                f"{type(self).__name__} has no argument {parameter}, so it does not support {given}; set "
                "data.document_mask: false to train on rows as they are"
            )

    def _with_documents(self, document_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords with which no layer of the model mixes documents; see [Note: documents in a row]."""
        implementation = attn_implementation(self.config)
        if self.mask_functions and implementation not in _DOCUMENT_ATTENTIONS:
            raise ModelError(
                f"document_ids need attention {' or '.join(map(repr, _DOCUMENT_ATTENTIONS))}, not {implementation!r}; "
                "set attn_implementation in the model's config"
            )
        if self.mask_functions and not self._attends_to_all(document_ids.shape[1]):
            separate_documents(implementation)
        elif self.mask_functions:
            self._require("attention_mask", "document_ids")
            mask = document_mask(document_ids)
            if implementation == "eager":
                blocked = torch.finfo(torch.get_default_dtype()).min
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, blocked)
            kwargs["attention_mask"] = mask
        return with_documents(kwargs, document_ids)

    def _attends_to_all(self, tokens: int) -> bool:
        """Whether one mask is right for all attention over rows of so many tokens: nothing is nearer than a row."""
        config: Any = self.config
        if attn_implementation(config) not in ("sdpa", "eager"):
            return False
        if self.reads_mask or getattr(config, "output_router_logits", False):
            return False  # biases by distance and the balance loss take no mask of pairs
        text = config.get_text_config()
        lengths = {name: setting(text, key, mixed=0) for name, key in _LOCAL_MASKS.items()}
        lengths |= dict.fromkeys(_GLOBAL_MASKS)
        return all((length := lengths.get(name, 0)) is None or tokens <= length for name in self.mask_functions)


def _owners_of(root: nn.Module, module: nn.Module) -> list[tuple[Any, nn.Module]]:
    """Return every module from `root` down to `module`, each as (the innermost model that contains it, the module)."""
    name = next(name for name, candidate in root.named_modules() if candidate is module)
    owner, ancestors = root, [(root, root)]
    for child in name.split(".") if name else ():
        holder = ancestors[-1][1].get_submodule(child)
        owner = holder if initializes(holder) else owner
        ancestors.append((owner, holder))
    return ancestors


def hf_config(config: HFConfig, *, trust_code: bool = False) -> Any:
    """Return the `transformers` config of the folder `model.path`, or from the keys in `model.config`."""
    described = _described(config, trust_code=trust_code)
    if config.num_labels is not None:
        described.num_labels = config.num_labels
    return described


def _described(config: HFConfig, *, trust_code: bool) -> Any:
    from transformers import AutoConfig, GenerationConfig

    if (config.path is None) == (config.config is None):
        raise ModelError("model.type: hf takes either model.path or model.config, and exactly one of them")
    if config.path is not None:
        if not (Path(config.path) / "config.json").is_file():
            raise ModelError(f"model.path={config.path!r} is not a model folder: it has no config.json")
        read_json_object(Path(config.path) / "config.json", ModelError)
        described = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=trust_code)
        if hasattr(described, "quantization_config"):
            del described.quantization_config  # weights are computed back to full ones when they are loaded
        return described
    given = _with_floats(dict(config.config or {}))
    model_type = given.pop("model_type", None)
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ModelError(
            f"model.config.model_type={model_type!r} is unknown to the installed transformers; "
            "write one of its model types, such as llama, gpt2 or qwen3"
        ) from error
    described = AutoConfig.for_model(model_type, **given)
    # transformers accepts unknown keys without a warning, so a misspelt one would have no effect.
    for key, default_of_key, name in _unread(described, default, given, GenerationConfig()):  # type: ignore[no-untyped-call]
        close = difflib.get_close_matches(name, default_of_key.to_dict(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; nothing reads it, leave it out"
        raise ModelError(f"model.config.{key} is not a setting of a {default_of_key.model_type!r} model{hint}")
    return described


def _with_floats(value: Any) -> Any:
    """Return a value of a `config.json`, where floats that JSON has not are written as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(entry) for key, entry in value.items()}
    return [_with_floats(entry) for entry in value] if isinstance(value, list) else value


def _unread(
    config: Any, default: Any, given: Mapping[str, Any], generation: Any, prefix: str = ""
) -> Iterator[tuple[str, Any, str]]:
    """Yield each given key that nothing reads: its path, the config that has no such key, and its name there."""
    for key, value in given.items():
        nested = vars(config).get(key)
        if isinstance(value, Mapping) and hasattr(nested, "to_dict") and hasattr(nested, "model_type"):
            # That of the default may have keys that the outer class sets.
            inner = vars(default).get(key)
            inner = inner if type(inner) is type(nested) else type(nested)()
            yield from _unread(nested, inner, value, generation, f"{prefix}{key}.")
        # A key that the config class reads under another name is not left in the config.
        elif key in vars(config) and not (
            _has(default, key) or hasattr(generation, key) or _is_asked_for(key, type(config))
        ):
            yield f"{prefix}{key}", default, key


def _has(default: Any, key: str) -> bool:
    """Whether a config class has a setting: not by `hasattr`, since some that differ by layer raise errors."""
    declared = getattr(type(default), key, None) if hasattr(type(default), key) else None
    return (
        key in vars(default)
        or f"_{key}" in vars(default)
        or key in default.to_dict()
        or key in type(default).attribute_map
        or not (declared is None or callable(declared))
    )


def _is_asked_for(key: str, config_class: type) -> bool:
    """Whether a model's code reads a setting that its config class does not list, as many do with `head_dim`."""
    module = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the class is not in a package of models
        return False
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).read_text(encoding="utf-8")
    return (
        re.search(rf"""getattr\((self\.)?config, ["']{re.escape(key)}["']|config\.{re.escape(key)}\b""", text)
        is not None
    )


def describe(model: nn.Module) -> dict[str, Any]:
    """Return the `config.json` with which `transformers` builds the same model, its class included.

    The folder's own `config.json` cannot be used: if the model is trained for another task than the one it was saved
    for, its class is another.
    """
    config: Any = model.config
    hf_config: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    # The config has the class of the folder that it was loaded from, so the model's own class is set.
    return {**hf_config, "architectures": [type(model).__name__]}


_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tiny-llama": {"config": {"model_type": "llama", **_SIZES}},
        "tiny-qwen": {"config": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **_SIZES}},
        "tiny-gpt2": {
            "config": {
                "model_type": "gpt2",
                "vocab_size": 256,
                "n_embd": 64,
                "n_layer": 2,
                "n_head": 4,
                "n_positions": 64,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        },
    }
)
"""Tiny models of three families, as keywords of `HFConfig`; for tests and first steps."""


def load_pretrained(model: nn.Module, path: str | Path, put: Put, *, wanted: Wanted = lambda _: ()) -> Reading:
    """Load a folder into an adapted model; return which parameters keep their random values, and what was read.

    If the folder has the same architecture, all weights have to match, and none is missing. For another task (a
    classifier from a language model), only the body (all but the head) has to match. Stored names and shapes are
    converted as `transformers` converts them ([Note: weights are stored in another form], `transformers_internals.py`);
    see `stream_groups` for what is read.
    """
    hf: Any = model
    body = f"{hf.base_model_prefix}."
    may_skip = [*may_be_unexpected(model), *_COMPUTED]
    may_miss = may_be_missing(model)
    if type(model).__name__ not in _architectures(path):
        head = _outside(body)
        if any(name.startswith(body) for name in model.state_dict()):
            may_miss += [head, r"\.pooler\."]  # only for some tasks does the body have a pooler
        may_skip.append(head)
    groups = partial(groups_to_load, model)
    return stream_groups(model, path, put, groups=groups, wanted=wanted, may_miss=may_miss, may_skip=may_skip)


_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Patterns of stored tensors that the modules compute themselves."""


def made_from_stored(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    """Return how to compute each tensor of an adapted model from stored ones with these names and shapes."""
    return _made(groups_to_load(model, shapes), shapes)


def build_stored(config: HFConfig, *, trust_code: bool = False) -> nn.Module:
    """Return the model that a folder was written from, whatever `task` says; else that of `build_hf_model`."""
    import transformers

    names = [] if config.path is None else _architectures(config.path)
    cls = getattr(transformers, names[0], None) if names else None
    if cls is None:
        return build_hf_model(config, trust_code=trust_code)
    model: nn.Module = cls(_described(config, trust_code=False))
    return model


def made_to_store(model: nn.Module) -> dict[str, Made] | None:
    """Return how to compute what `save_pretrained` writes from the tensors of an adapted model.

    None if these are the same. Parameters that are tied are taken under their first name.
    """
    first = {id(tensor): name for name, tensor in unique_tensors(model).items()}
    kept: dict[str, str] = {}  # the name that `transformers` keeps of a tied parameter → its first one
    tied = tied_names(model)
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0] in tied):
        if id(tensor) in first and not any(re.search(pattern, name) for pattern in not_stored(model)):
            kept[name] = first.pop(id(tensor))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name in kept}
    made = {
        name: Made(tuple(kept[source] for source in sources), make)
        for name, (sources, make) in _made(groups_to_store(model, kept), shapes).items()
    }
    return None if are_unchanged(made) else made


def _made(groups: Iterable[WeightGroup], shapes: Mapping[str, torch.Size]) -> dict[str, Made]:
    made: dict[str, Made] = {}
    conversions = Conversions()
    for group in groups:
        for name in group.convert({name: torch.empty(shapes[name], device="meta") for name in group.sources}):
            made.setdefault(name, Made(group.sources, same) if group.renames else conversions.made(group, name))
    return made


def _architectures(path: str | Path) -> list[str]:
    architectures = read_json_object(Path(path) / "config.json", ModelError).get("architectures")
    return architectures if isinstance(architectures, list) else []


def _outside(prefix: str) -> str:
    """Return a regular expression for the names that do not start with `prefix`."""
    return rf"^(?!{re.escape(prefix)})"
