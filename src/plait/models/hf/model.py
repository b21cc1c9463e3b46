"""A `transformers` model that speaks Plait's protocol.

The model itself is not wrapped and not edited: its class is extended in place, as `fully_shard` does it. So
every parameter keeps the name it has in `transformers`, a checkpoint is a `transformers` checkpoint, and
`save_pretrained`, `generate` and `peft` work on it.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from plait.config import HFConfig, read_json_object, transformers_code
from plait.errors import MissingExtraError, ModelError, PlaitError
from plait.models.common.documents import document_mask
from plait.models.common.fp8_loss import Fp8Head
from plait.models.common.loss import cross_entropy
from plait.models.hf.block import find_block_classes
from plait.models.hf.head import are_many, hands_on_its_logits, loss_at_the_head
from plait.ops import attends_both_ways, mixer_without_mask
from plait.spec import LossTerm
from plait.transformers_internals import attn_implementation, init_weights, initializes, taken_for_initialized

AUTO_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "causal-lm": "AutoModelForCausalLM",
        "masked-lm": "AutoModelForMaskedLM",
        "seq2seq-lm": "AutoModelForSeq2SeqLM",
        "sequence-classification": "AutoModelForSequenceClassification",
        "base": "AutoModel",
    }
)
"""The `transformers` class that builds the model for each `model.task`."""

_OLD_KEYS = frozenset({"rope_theta", "rope_scaling", "torch_dtype", "transformers_version"})
"""Keys of older config files that `transformers` still reads, though its config classes no longer list them."""


def build_hf_model(config: HFConfig, *, trust_code: bool = False) -> nn.Module:
    """The architecture that `config` describes, with random weights; `load_pretrained` fills them.

    Parameters have torch's default dtype whatever the stored config says: precision is a choice of the run.
    """
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "model.type: hf", "hf") from error
    auto = getattr(transformers, AUTO_CLASSES[config.task])
    source, key = (config.config or {}, "model.config") if config.path is None else (config.path, "model.path")
    try:
        with transformers_code(source, trust_code=trust_code, key=key) as trusted:
            described = _described(config, trust_code=trusted)
            model: nn.Module = auto.from_config(described, dtype=torch.get_default_dtype(), trust_remote_code=trusted)
    except PlaitError:
        raise
    except Exception as error:  # a value that no layer can have is found out by whatever it breaks
        raise ModelError(
            f"transformers cannot build {key}={source!r:.200} for model.task={config.task!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if config.task == "causal-lm" and attends_both_ways(model):
        raise ModelError(
            f"model.config.is_decoder=False: a {described.model_type!r} model is an encoder then, and sees the token "
            "that model.task='causal-lm' has it predict; set is_decoder: true in the model's config"
        )
    return adapt(model, CausalLM if config.task == "causal-lm" else OtherTask)


def adapt(model: nn.Module, adapter: type[Adapter]) -> nn.Module:
    """Extend the class of one `transformers` model by `adapter`, in place."""
    original = type(model)
    members: dict[str, object] = {
        "__module__": original.__module__,
        "block_classes": find_block_classes(model),
        "accepts": frozenset(inspect.signature(original.forward).parameters),
    }
    if issubclass(adapter, CausalLM):
        members["tiles_loss"] = hands_on_its_logits(model, original.forward)
    model.__class__ = type(original.__name__, (adapter, original), members)
    return model


class Adapter(nn.Module):
    """What every adapted model has beside its own members."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    accepts: ClassVar[frozenset[str]]
    """The parameters of the original forward."""

    def init_weights(self, module: nn.Module | None = None) -> None:
        """Fill the direct parameters and buffers of one module, as `transformers` would.

        Some rules of `transformers` sit on a parent and reach into its children (GPT-2 scales its residual
        projections that way), so those of all ancestors are applied too, from the inside out as it does
        itself, while its own mark for finished tensors protects every tensor but this module's.
        Without a module it is what `transformers` calls so: all of the model.
        """
        if module is None:
            super().init_weights()  # type: ignore[misc]
            return
        own = {id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
        others = [t for t in (*self.parameters(), *self.buffers()) if id(t) not in own]
        with taken_for_initialized(others):
            for owner, holder in reversed(_owners(self, module)):
                init_weights(owner, holder)

    def flops_per_token(self, seq_len: int) -> float:
        """6 FLOPs for each parameter but the looked-up embedding; attention differs too much to count."""
        model: Any = self
        inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head is not None and head.weight is inputs.weight
        lookups = 0 if tied else inputs.weight.numel()
        return 6.0 * (sum(p.numel() for p in self.parameters()) - lookups)


class CausalLM(Adapter):
    """A decoder: Plait's batch in, `LossTerm` or logits out."""

    tiles_loss: ClassVar[bool]
    """Whether the loss can be finished in the head; see [Note: a loss without logits] in `models.hf.head`."""
    fp8_head: Fp8Head | None = None
    """How the loss computes its gradients, where that is in 8 bits."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Loss where labels (shifted already) are given, logits where not.

        Other keywords go to `transformers` as they are. With `return_dict` the call is in its own words, as
        `generate` makes it, and is answered so.
        """
        if "return_dict" in kwargs:
            return super().forward(input_ids, labels=labels, **kwargs)
        if positions is not None:
            self._require("position_ids", "positions")
            kwargs["position_ids"] = positions
        if document_ids is not None:
            self._require("attention_mask", "document_ids")
            kwargs["attention_mask"] = self._document_mask(document_ids)
        if "use_cache" in self.accepts:
            kwargs["use_cache"] = False
        if labels is not None and self.tiles_loss and are_many(self, labels, self.fp8_head):
            with loss_at_the_head(self, labels, self.fp8_head) as found:
                output = super().forward(input_ids, return_dict=True, **kwargs)
            (loss,) = found
        else:
            output = super().forward(input_ids, return_dict=True, **kwargs)
            if labels is None:
                return output.logits
            loss = cross_entropy(output.logits, labels)
        balance = getattr(output, "aux_loss", None)
        if balance is None:
            return loss
        # A mixture of experts adds a mean; times the count it is a sum like the rest.
        weight: Any = self.router_aux_loss_coef
        return LossTerm(loss.sum + weight * balance * loss.count, loss.count)

    def _require(self, parameter: str, given: str) -> None:
        if parameter not in self.accepts:
            raise ModelError(
                f"{type(self).__name__} takes no {parameter}, so it cannot be given {given}; set data.document_mask: "
                "false to train on rows as they are"
            )

    def _document_mask(self, document_ids: Tensor) -> Tensor:
        config: Any = self.config
        mixer = mixer_without_mask(self)
        if mixer is not None:
            raise ModelError(
                f"{type(self).__name__} has {mixer}, which no mask keeps from running on into the next document of a "
                "packed row; set data.document_mask: false to train on rows as they are, or sft.packing: false for one "
                "example in each row"
            )
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                "document_ids with output_router_logits: the balance loss of transformers cannot read such a "
                "mask; set output_router_logits: false or pack without document ids"
            )
        text = config.get_text_config()
        for key, what in (("sliding_window", "a sliding window"), ("attention_chunk_size", "attention in chunks")):
            length = getattr(text, key, None)
            if length is not None and document_ids.shape[1] > length:
                raise ModelError(
                    f"document_ids with {what} of {length} tokens: {type(self).__name__} cannot combine "
                    f"both for rows of {document_ids.shape[1]}; shorten the rows or pack without document ids"
                )
        mask = document_mask(document_ids)
        if attn_implementation(config) == "sdpa":
            return mask
        if attn_implementation(config) == "eager":
            blocked = torch.finfo(torch.get_default_dtype()).min
            return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, blocked)
        raise ModelError(
            f"document_ids need attention 'sdpa' or 'eager', not {attn_implementation(config)!r}; "
            "set attn_implementation in the model's config"
        )


class OtherTask(Adapter):
    """Any other task: the batch goes in, and the model's own dictionary with its mean `loss` comes out."""


def _owners(root: nn.Module, module: nn.Module) -> list[tuple[Any, nn.Module]]:
    """Every module from `root` down to `module`, each beside the innermost (sub)model that it belongs to."""
    name = next(name for name, candidate in root.named_modules() if candidate is module)
    owner, chain = root, [(root, root)]
    for child in name.split(".") if name else ():
        holder = chain[-1][1].get_submodule(child)
        owner = holder if initializes(holder) else owner
        chain.append((owner, holder))
    return chain


def _described(config: HFConfig, *, trust_code: bool) -> Any:
    """The `transformers` config that `model.path` or `model.config` stands for."""
    from transformers import AutoConfig, GenerationConfig

    if (config.path is None) == (config.config is None):
        raise ModelError("model.type: hf takes either model.path or model.config, and exactly one of them")
    if config.path is not None:
        if not (Path(config.path) / "config.json").is_file():
            raise ModelError(f"model.path={config.path!r} is no model folder: it has no config.json")
        read_json_object(Path(config.path) / "config.json", ModelError)
        return AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=trust_code)
    given = dict(config.config or {})
    model_type = given.pop("model_type", None)
    try:
        default = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ModelError(
            f"model.config.model_type={model_type!r} is unknown to the installed transformers; "
            "write one of its model types, such as llama, gpt2 or qwen3"
        ) from error
    # transformers keeps unknown keys without a word, so a misspelt one would change nothing.
    generation = GenerationConfig()  # type: ignore[no-untyped-call]
    for key in given:
        listed = key in _OLD_KEYS or hasattr(default, key) or hasattr(generation, key)
        if not listed and not _is_asked_for(key, model_type):
            close = difflib.get_close_matches(key, default.to_dict(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ModelError(f"model.config.{key} is no setting of a {model_type!r} model{hint}")
    return AutoConfig.for_model(model_type, **given)


def _is_asked_for(key: str, model_type: str) -> bool:
    """Whether a model's own code asks for a setting that its config class does not list, as many do for `head_dim`."""
    name = model_type.replace("-", "_")
    found = importlib.util.find_spec(f"transformers.models.{name}.modeling_{name}")
    if found is None or found.origin is None:
        return False
    return f'getattr(config, "{key}"' in Path(found.origin).read_text(encoding="utf-8")
