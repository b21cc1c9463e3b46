"""Questions about images with their answers, as a vision-language model's processor prepares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import ImageChatData
from plait.data.images import read_image
from plait.data.labeled import JsonRows
from plait.data.packing import IGNORE
from plait.errors import DataError, MissingExtraError


class ImageChats(Dataset[dict[str, Tensor]]):
    """Prompts with images, and completions, which are trained on.

    The processor of `transformers` puts the placeholders of images into the text and cuts the images as the model
    wants them. Labels are the next tokens, those of the prompt and of images left out. A row's `input_ids`, `labels`
    and what else has an entry per token are padded to `seq_len`; what belongs to images is concatenated (`collate`).
    """

    def __init__(self, config: ImageChatData, *, use: Any = None) -> None:
        self._config = config
        self._rows = JsonRows(config.path)
        self._processor = _load_processor(config.processor)
        tokenizer = self._processor.tokenizer
        pad = tokenizer.pad_token_id
        self._pad = tokenizer.eos_token_id if pad is None else pad
        begins = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
        self._begin: str = tokenizer.bos_token if begins else ""
        """The token that the tokenizer puts before a text, which a chat template may have or not."""
        self.vocab_size = len(tokenizer)
        self.seq_len = config.seq_len
        for index in range(len(self._rows)):
            self._images(index)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config = self._config
        prompt, completion = (self._rows.text(index, key) for key in (config.prompt_key, config.completion_key))
        images = [read_image(path) for path in self._images(index)]
        asked, answer = self._texts(prompt, completion, len(images))
        tokenizer = self._processor.tokenizer
        if self._begin and not asked.startswith(self._begin):
            asked = self._begin + asked
        text = {"text": [asked + answer], "return_tensors": "pt", "add_special_tokens": False}
        inputs = dict(self._processor(images=images or None, **text))
        ids = inputs["input_ids"][0]
        learned = torch.tensor(tokenizer(answer, add_special_tokens=False)["input_ids"])
        if not torch.equal(ids[len(ids) - len(learned) :], learned):
            raise DataError(
                f"{self._rows.where(index)}: the processor in {config.processor} makes other tokens of the completion "
                "behind the prompt than alone, so it is not known where the completion begins; end the prompt, or the "
                "chat template's generation prompt, with a new line"
            )
        if len(ids) > config.seq_len:
            raise DataError(
                f"{self._rows.where(index)}: {len(ids)} tokens with those of the images, and data.seq_len is "
                f"{config.seq_len}; write data.seq_len: {len(ids)} or more"
            )
        labels = torch.full((config.seq_len,), IGNORE)
        labels[len(ids) - len(learned) - 1 : len(ids) - 1] = learned
        return {**{key: self._padded(key, value, len(ids)) for key, value in inputs.items()}, "labels": labels}

    def _padded(self, key: str, value: Tensor, length: int) -> Tensor:
        if tuple(value.shape) != (1, length):
            return value
        row = torch.full((1, self._config.seq_len), self._pad if key == "input_ids" else 0, dtype=value.dtype)
        row[:, :length] = value
        return row

    @staticmethod
    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the rows' tokens as one batch, and their images one after another."""
        keys = dict.fromkeys(key for row in rows for key in row)
        return {
            key: torch.stack([row[key] for row in rows])
            if key == "labels"
            else torch.cat([row[key] for row in rows if key in row])
            for key in keys
        }

    def _texts(self, prompt: str, completion: str, images: int) -> tuple[str, str]:
        """Return the prompt with the placeholders of images, and the completion, as the chat template has them."""
        processor = self._processor
        if getattr(processor, "chat_template", None) is None:
            end = processor.tokenizer.eos_token or ""
            return f"{processor.image_token * images}{prompt}", f"{completion}{end}"
        shown = [{"type": "image"}] * images
        asked = [{"role": "user", "content": [*shown, {"type": "text", "text": prompt}]}]
        said = [*asked, {"role": "assistant", "content": [{"type": "text", "text": completion}]}]
        first = processor.apply_chat_template(asked, add_generation_prompt=True)
        whole = processor.apply_chat_template(said)
        if not whole.startswith(first):
            raise DataError(
                f"the chat template in {self._config.processor} does not continue its generation prompt with an "
                "answer, so it is not known what to train on; give a processor whose template does"
            )
        return first, whole[len(first) :]

    def _images(self, index: int) -> list[Path]:
        named = self._rows[index].get(self._config.image_key) or []
        return [self._rows.file(index, name) for name in (named if isinstance(named, list) else [named])]


def _load_processor(folder: str) -> Any:
    try:
        from transformers import AutoProcessor
    except ImportError as error:
        raise MissingExtraError("transformers", "data.type: image_chat", "hf") from error
    try:
        load: Any = AutoProcessor.from_pretrained
        processor = load(folder, local_files_only=True)
    except Exception as error:  # a missing file or package raises whatever error it causes
        raise DataError(
            f"data.processor={folder!r}: transformers cannot load its processor: {type(error).__name__}: {error}"
        ) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise DataError(
            f"data.processor={folder!r} holds a {type(processor).__name__}, which does not take both texts and images; "
            "give the folder of a vision-language model with its preprocessor_config.json"
        )
    return processor
