"""Losses of `transformers` models for tasks besides the next token.

Each class here is put in front of a model's class, as `CausalLM` is. Given labels, its `forward` computes the loss as a
sum with its count from what the model returns (logits, embeddings, pixels), and not from the model's own loss, which is
a mean over one micro-batch: the mean over a step could not be computed from those. Without labels, or with
`return_dict`, `forward` is that of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from plait.distributed import all_gather
from plait.errors import ModelError
from plait.models.common.losses import cross_entropy
from plait.models.common.protocol import IGNORE_INDEX, LossTerm


class _Task(nn.Module):
    """What the tasks have in common. The model's own class comes behind it."""

    def _answer(self, **inputs: Any) -> Any:
        if "use_cache" in self.accepts:  # type: ignore[operator]
            inputs.setdefault("use_cache", False)
        return super().forward(return_dict=True, **inputs)

    def _refuse_router_loss(self) -> None:
        config: Any = self.config
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{type(self).__name__} with model.config.output_router_logits: the balance loss of its experts is "
                "not computed for this task; set it to false"
            )


class TokenLabels(_Task):
    """Labels at the index of the token that is predicted: masked words."""

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return `loss` and `logits` if labels are given, else what `transformers` returns."""
        if labels is None or "return_dict" in inputs:
            return super().forward(input_ids, labels=labels, **inputs)
        self._refuse_router_loss()
        output = self._answer(input_ids=input_ids, **inputs)
        return {"loss": cross_entropy(output.logits, labels), "logits": output.logits}


class ImageTextLabels(TokenLabels):
    """A vision-language model. Labels are the next tokens: the data have shifted them."""


class DecoderLabels(_Task):
    """An encoder with a decoder, whose inputs are the labels, shifted to the right."""

    def forward(self, *args: Any, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Return `loss` and `logits` if labels are given, else what `transformers` returns."""
        if labels is None or "return_dict" in inputs or args:
            return super().forward(*args, labels=labels, **inputs)
        self._refuse_router_loss()
        if inputs.get("decoder_input_ids") is None and inputs.get("decoder_inputs_embeds") is None:
            inputs["decoder_input_ids"] = self._shifted(labels)
        output = self._answer(**inputs)
        return {"loss": cross_entropy(output.logits, labels), "logits": output.logits}

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return the start token, and the labels without the last one; as the model itself has it, where it says so."""
        model: Any = self
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            try:
                shifted: Tensor = shift(labels=labels)
            except (AttributeError, TypeError, ValueError):  # the config lacks a token, which is named below
                pass
            else:
                return shifted
        start, pad = (self._token(name) for name in ("decoder_start_token_id", "pad_token_id"))
        shifted = torch.cat([labels.new_full((len(labels), 1), start), labels[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == IGNORE_INDEX, pad)

    def _token(self, name: str) -> int:
        config: Any = self.config
        token = getattr(config, name, None)
        token = getattr(config.get_text_config(decoder=True), name, None) if token is None else token
        if not isinstance(token, int):
            raise ModelError(f"model.config.{name} is {token!r}, and the decoder of {type(self).__name__} needs it")
        return token


class ClassLabels(_Task):
    """A classifier of text or images: one class, several at once, or a number.

    As in `transformers`, `model.config.problem_type` decides, and without it the labels do: numbers where there is one
    output, classes where they are integers, else several at once.
    """

    def forward(
        self,
        *args: Any,
        labels: Tensor | None = None,
        image: Tensor | None = None,
        label: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Return `loss` and `logits` if labels are given. `image` and `label` are the names of Plait's image data."""
        labels = label if labels is None else labels
        if image is not None:
            inputs["pixel_values"] = image
        if labels is None or "return_dict" in inputs or args:
            return super().forward(*args, **inputs, **({} if labels is None else {"labels": labels}))
        logits = self._answer(**inputs).logits
        return {"loss": self._loss(logits, labels), "logits": logits}

    def _loss(self, logits: Tensor, labels: Tensor) -> LossTerm:
        config: Any = self.config
        kind = config.problem_type
        if kind is None:
            one = logits.shape[-1] == 1
            kind = "regression" if one else "multi_label" if labels.is_floating_point() else "single_label"
        if kind.startswith("single_label"):
            if labels.is_floating_point() or labels.ndim != 1:
                raise ModelError(
                    f"labels of shape {tuple(labels.shape)} and dtype {labels.dtype}, and model.config.problem_type "
                    f"{config.problem_type!r} with {logits.shape[-1]} outputs needs one class per sample, by its number"
                )
            return cross_entropy(logits, labels)
        labels = labels.float().reshape(len(labels), -1)
        if labels.shape != logits.shape:
            raise ModelError(
                f"labels of shape {tuple(labels.shape)} for {logits.shape[-1]} outputs: set model.config.num_labels, "
                "or data.classes"
            )
        if kind == "regression":
            losses = F.mse_loss(logits.float(), labels, reduction="none")
        else:
            losses = F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        return LossTerm(losses.sum(), losses.numel())


class MaskedPixels(_Task):
    """Masked image modelling: the absolute error of the hidden patches' pixels."""

    def forward(self, image: Tensor | None = None, bool_masked_pos: Tensor | None = None, **inputs: Any) -> Any:
        """Return `loss` and `logits` (the pixels) if `image` is given."""
        if image is None or "return_dict" in inputs:
            return super().forward(bool_masked_pos=bool_masked_pos, **inputs)
        if bool_masked_pos is None:
            raise ModelError(
                "nothing is hidden in the images for model.task: masked-image-modeling; "
                "write data.objective: {type: masked_image}"
            )
        config: Any = self.config
        patches = (image.shape[-1] // config.patch_size) ** 2
        if bool_masked_pos.shape[1] != patches:
            raise ModelError(
                f"bool_masked_pos has {bool_masked_pos.shape[1]} patches, and images of {image.shape[-1]} pixels have "
                f"{patches} for this model; write data.objective.patch_size: {config.patch_size}"
            )
        output = self._answer(pixel_values=image, bool_masked_pos=bool_masked_pos)
        pixels = getattr(output, "reconstruction", None)
        if pixels is None or pixels.shape != image.shape:
            raise ModelError(
                f"{type(self).__name__} does not return the pixels of hidden patches; model.task masked-image-modeling "
                "is for models that do, such as ViT, DeiT and Swin"
            )
        side = config.patch_size
        grid = bool_masked_pos.reshape(len(image), image.shape[-2] // side, image.shape[-1] // side)
        hidden = grid.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, None].float()
        errors = (pixels.float() - image.float()).abs() * hidden
        return {"loss": LossTerm(errors.sum(), hidden.sum() * image.shape[1]), "logits": pixels}


# [Note: contrast over the micro-batch of all ranks]
# A contrastive loss compares every image with every text. Here these are all samples of one micro-batch, over the ranks
# that read different samples: `batch.total ÷ batch.accumulation` of them, as on one process with that accumulation.
# Each rank gathers the embeddings of all ranks and computes the loss of its own rows and columns; the backward pass of
# the gathering adds up what every rank's loss says about an embedding. So the sum over ranks is that of one process.


class ImageTextContrast(_Task):
    """CLIP's loss, or SigLIP's where the model has a bias: [Note: contrast over the micro-batch of all ranks]."""

    data_group: dist.ProcessGroup | None = None
    """The ranks that read different samples; None: this is the only one."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Return `loss` and `logits` (images × texts) for a training batch, else what `transformers` returns."""
        if args or "return_dict" in inputs or not {"input_ids", "pixel_values"} <= inputs.keys():
            return super().forward(*args, **inputs)
        scale = getattr(self, "logit_scale", None)
        if not isinstance(scale, Tensor):
            raise ModelError(
                f"{type(self).__name__} has no logit_scale; model.task contrastive-image-text is for models with the "
                "loss of CLIP or SigLIP"
            )
        output = self._answer(**inputs)
        images, texts = (_gathered(embeds, self.data_group) for embeds in (output.image_embeds, output.text_embeds))
        scale, bias = scale.exp(), getattr(self, "logit_bias", None)
        first = dist.get_rank(self.data_group) * len(output.image_embeds) if self.data_group is not None else 0
        pairs = torch.arange(first, first + len(output.image_embeds), device=images.device)
        by_image = scale.float() * output.image_embeds.float() @ texts.float().t()
        if bias is not None:
            signs = 2.0 * F.one_hot(pairs, len(texts)).float() - 1.0
            loss = -F.logsigmoid(signs * (by_image + bias.float())).sum()
        else:
            by_text = scale.float() * output.text_embeds.float() @ images.float().t()
            both = (F.cross_entropy(logits, pairs, reduction="sum") for logits in (by_image, by_text))
            loss = sum(both, start=by_image.new_zeros(())) / 2
        return {"loss": LossTerm(loss, len(pairs)), "logits": by_image}


def _gathered(embeds: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return embeds if group is None else all_gather(embeds.contiguous(), 0, group)


class TaskModel(NamedTuple):
    """How the models of a task are built, and how their loss is computed."""

    auto: str
    """The Auto class of `transformers`."""
    adapter: type[nn.Module] | None
    """Put in front of the model's class. None: the model's own forward pass."""


TASKS: Mapping[str, TaskModel] = MappingProxyType(
    {
        "masked-lm": TaskModel("AutoModelForMaskedLM", TokenLabels),
        "seq2seq-lm": TaskModel("AutoModelForSeq2SeqLM", DecoderLabels),
        "sequence-classification": TaskModel("AutoModelForSequenceClassification", ClassLabels),
        "image-classification": TaskModel("AutoModelForImageClassification", ClassLabels),
        "masked-image-modeling": TaskModel("AutoModelForMaskedImageModeling", MaskedPixels),
        "contrastive-image-text": TaskModel("AutoModelForZeroShotImageClassification", ImageTextContrast),
        "image-text-to-text": TaskModel("AutoModelForImageTextToText", ImageTextLabels),
        "speech-seq2seq": TaskModel("AutoModelForSpeechSeq2Seq", DecoderLabels),
        "base": TaskModel("AutoModel", None),
    }
)
"""The tasks besides `causal-lm`, by `model.task`."""
