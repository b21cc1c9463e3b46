"""Writes the data of the examples in this folder: a tokenizer, texts, pairs, classes, images, sounds.

    python make_data.py            # into ./data, beside the run descriptions

Everything is made here, small, and the same at every call.
"""

from __future__ import annotations

import json
import random
import sys
import wave
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", "<image>", *(f"<extra_id_{number}>" for number in range(20))]
"""Their places are their ids: pad 0, start 1, end 2, mask 3, image 5."""
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TRANSLATED = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"]
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "white": (240, 240, 240)}


def main(folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    texts = [sentence(dice) for _ in range(200)]
    (folder / "texts.txt").write_text("<|endoftext|>".join(texts), encoding="utf-8")
    pairs = [translation(dice) for _ in range(64)]
    write_lines(folder / "pairs.jsonl", pairs)
    write_lines(folder / "classes.jsonl", [opinion(dice) for _ in range(64)])
    write_tokenizer(folder / "tokenizer.json", [*texts, *(text for pair in pairs for text in pair.values())])
    write_processor(folder / "processor", folder / "tokenizer.json")
    write_images(folder, dice)
    write_sounds(folder, dice)


def sentence(dice: random.Random) -> str:
    """Return a text whose words follow from one another."""
    first = dice.randrange(len(NUMBERS))
    return " ".join(f"{NUMBERS[(first + step) % 8]} and" for step in range(dice.randrange(6, 18))) + " no more."


def translation(dice: random.Random) -> dict[str, str]:
    """Return a row of numbers in two languages."""
    chosen = [dice.randrange(8) for _ in range(dice.randrange(2, 5))]
    return {
        "source": " ".join(NUMBERS[number] for number in chosen),
        "target": " ".join(TRANSLATED[number] for number in chosen),
    }


def opinion(dice: random.Random) -> dict[str, str]:
    """Return a text with the class that one of its words decides."""
    good = dice.random() < 0.5
    word = dice.choice(["good", "fine"] if good else ["bad", "poor"])
    return {"text": f"this {dice.choice(NUMBERS)} is {word} I think", "label": "positive" if good else "negative"}


def write_tokenizer(path: Path, texts: list[str]) -> None:
    """Train a byte-level BPE with the special tokens of encoders and encoder-decoders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(path))


def write_processor(folder: Path, tokenizer: Path) -> None:
    """Write the files of a LLaVA processor: 16 patches, and the token that the vision model drops."""
    folder.mkdir(exist_ok=True)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "extra_special_tokens": {"image_token": "<image>"},
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": {"height": 32, "width": 32},
            "do_center_crop": False,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.read_text(encoding="utf-8"), encoding="utf-8")


def write_images(folder: Path, dice: random.Random) -> None:
    """Write squares in a folder per color, and `images.jsonl`, which says what each shows."""
    noise = np.random.default_rng(0)
    rows = []
    for color, value in COLORS.items():
        (folder / "images" / color).mkdir(parents=True, exist_ok=True)
        for number in range(8):
            pixels = noise.integers(0, 60, (40, 40, 3)).astype(np.uint8)
            size, left, top = 16 + dice.randrange(12), dice.randrange(12), dice.randrange(12)
            pixels[top : top + size, left : left + size] = value
            name = f"images/{color}/{number}.png"
            Image.fromarray(pixels).save(folder / name)
            rows.append({"image": name, "text": f"a {color} square", "prompt": "which color?", "completion": color})
    write_lines(folder / "images.jsonl", rows)


def write_sounds(folder: Path, dice: random.Random) -> None:
    """Write tones, and `sounds.jsonl`, which says how high each is."""
    (folder / "sounds").mkdir(exist_ok=True)
    rate, rows = 16000, []
    for number in range(16):
        which = number % 4
        times = np.arange(int(rate * (0.5 + dice.random() / 2))) / rate
        tone = 0.4 * np.sin(2 * np.pi * 220 * 2**which * times)
        name = f"sounds/{number}.wav"
        with wave.open(str(folder / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes((tone * 32767).astype("<i2").tobytes())
        rows.append({"audio": name, "text": f"tone {NUMBERS[which]}"})
    write_lines(folder / "sounds.jsonl", rows)


def write_lines(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
