"""Speech: wav files as log-mel spectrograms, with what is said in them.

[Note: log-mel spectrograms] What `transformers`' WhisperFeatureExtractor computes, without it: windows of 25 ms every
10 ms, Slaney's mel scale up to half the sampling rate, logarithm to base 10, at most 8 below the maximum, scaled to
about -1 to 1.
"""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.config import SpeechData
from plait.data.labeled import EncodedTexts, JsonRows
from plait.data.tokenizer import load_tokenizer
from plait.errors import DataError

WINDOW_S, HOP_S = 0.025, 0.01
FLOOR = 1e-10
START_OF_TRANSCRIPT = "<|startoftranscript|>"
"""Whisper's start token, which the decoder gets as its first input and never predicts."""


class Speech(Dataset[dict[str, Tensor]]):
    """Log-mel spectrograms (`input_features`) and transcripts (`labels`)."""

    def __init__(self, config: SpeechData, *, use: Any = None) -> None:
        self._config = config
        self._rows = JsonRows(config.path)
        tokenizer = load_tokenizer(config.tokenizer)
        self.vocab_size = tokenizer.vocab_size
        self._texts = EncodedTexts(tokenizer, config.seq_len, truncate=config.truncate)
        start = tokenizer.backend.token_to_id(START_OF_TRANSCRIPT)
        self._start = () if start is None else (start,)
        self._filters = mel_filters(config.sampling_rate, round(config.sampling_rate * WINDOW_S), config.mel_bins)
        for index in range(len(self._rows)):
            read_wav(self._sound(index), config.sampling_rate, config.seconds, samples=False)
        self._texts.check((self._rows.text(index, config.text_key) for index in range(len(self._rows))), config.path)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config = self._config
        sound = read_wav(self._sound(index), config.sampling_rate, config.seconds)
        text = self._rows.text(index, config.text_key)
        return {
            "input_features": log_mel(sound, config.sampling_rate, self._filters),
            "labels": self._texts.labels(text, without=self._start),
        }

    def _sound(self, index: int) -> Path:
        return self._rows.file(index, self._rows.value(index, self._config.audio_key))


def read_wav(path: Path, rate: int, seconds: float, *, samples: bool = True) -> Tensor:
    """Return the sound of a wav file (PCM), its channels averaged, from -1 to 1, padded with silence to `seconds`.

    Raise a `DataError` if it is longer or has another sampling rate. `samples` false: only check that.
    """
    try:
        with wave.open(str(path), "rb") as file:
            count, width, channels = file.getnframes(), file.getsampwidth(), file.getnchannels()
            its_rate = file.getframerate()
            raw = file.readframes(count) if samples else b""
    except (wave.Error, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read as a wav file (PCM): {error}; convert it") from error
    if its_rate != rate:
        raise DataError(
            f"{path} has {its_rate} samples per second, and data.sampling_rate is {rate}; convert it, for example by "
            f"`ffmpeg -i {path.name} -ar {rate} -ac 1 out.wav`"
        )
    length = round(seconds * rate)
    if count > length:
        raise DataError(f"{path} lasts {count / rate:.1f} s, and data.seconds is {seconds:g}; cut it, or write more")
    sound = torch.zeros(length)
    if samples:
        values = _integers(raw, width).reshape(-1, channels).mean(axis=1) / float(1 << (8 * width - 1))
        sound[: len(values)] = torch.from_numpy(values.astype(np.float32))
    return sound


def _integers(raw: bytes, width: int) -> Any:
    """Return PCM samples as signed integers."""
    if width == 1:
        return np.frombuffer(raw, np.uint8).astype(np.int32) - 128
    if width == 3:
        triples = np.frombuffer(raw, np.uint8).reshape(-1, 3).astype(np.int32)
        values = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
        return values - ((values >> 23) << 24)
    return np.frombuffer(raw, "<i2" if width == 2 else "<i4")


def log_mel(sound: Tensor, rate: int, filters: Tensor) -> Tensor:
    """Return the log-mel spectrogram of a sound, (bands, frames): [Note: log-mel spectrograms]."""
    window, hop = round(rate * WINDOW_S), round(rate * HOP_S)
    spectrum = torch.stft(sound, window, hop, window=torch.hann_window(window), return_complex=True)
    power = spectrum[..., :-1].abs() ** 2
    logs = (filters @ power).clamp(min=FLOOR).log10()
    return (logs.maximum(logs.max() - 8.0) + 4.0) / 4.0


def mel_filters(rate: int, window: int, bands: int) -> Tensor:
    """Return triangular filters (bands, window // 2 + 1) of equal area, evenly spaced on Slaney's mel scale."""
    frequencies = np.linspace(0.0, rate / 2, window // 2 + 1)
    edges = _hertz(np.linspace(0.0, float(_mel(np.array(rate / 2))), bands + 2))
    rising = (frequencies[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies[None]) / np.diff(edges)[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(filters.astype(np.float32))


# Slaney's mel scale is linear up to 1000 Hz and logarithmic above.
_LINEAR, _STEP = 1000.0, 27.0 / np.log(6.4)


def _mel(hertz: Any) -> Any:
    return np.where(hertz < _LINEAR, 3.0 * hertz / 200.0, 15.0 + np.log(np.maximum(hertz, 1.0) / _LINEAR) * _STEP)


def _hertz(mel: Any) -> Any:
    return np.where(mel < 15.0, 200.0 * mel / 3.0, _LINEAR * np.exp((mel - 15.0) / _STEP))
