"""Metrics: measured for each sample exactly once, however many ranks share the work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from plait.config import AccuracyConfig, MetricConfig
from plait.errors import ModelError
from plait.plugins import build_instance


class Metric(ABC):
    """Turns model outputs into records, one per sample, and the records of all samples into numbers.

    `summarize` gets the records of all ranks, in an unspecified order.
    """

    @abstractmethod
    def measure(self, outputs: Any, inputs: Any) -> Sequence[Any]:
        """Return one record for each sample of a micro-batch, of plain Python values: they are sent between ranks."""

    @abstractmethod
    def summarize(self, records: Sequence[Any]) -> Mapping[str, float]:
        """Return the values of the metric, by name, computed from the records of all samples."""


class Accuracy(Metric):
    """The fraction of samples whose label is among the `top` most likely classes."""

    def __init__(self, *, top: int = 1, label: str = "label", logits: str = "logits", prefix: str = "accuracy") -> None:
        self._top = top
        self._label = label
        self._logits = logits
        self._name = f"{prefix}/top{top}"

    def measure(self, outputs: Any, inputs: Any) -> Sequence[bool]:
        """Return, for each sample, whether its label is among the `top` most likely classes."""
        logits = outputs.get(self._logits) if isinstance(outputs, Mapping) else outputs
        label = _label(inputs, self._label)
        if not isinstance(logits, Tensor) or label is None or logits.ndim != 2:
            raise ModelError(
                f"Accuracy needs logits of shape (samples, classes) in the outputs, as a tensor or under "
                f"{self._logits!r}, and labels under {self._label!r} or in second place of the batch"
            )
        hits = logits.topk(self._top, dim=-1).indices == label.to(logits.device).unsqueeze(-1)
        return [bool(hit) for hit in hits.any(-1).tolist()]

    def summarize(self, records: Sequence[bool]) -> Mapping[str, float]:
        """Return the fraction of correct samples."""
        return {self._name: sum(records) / len(records) if records else math.nan}


def accuracy(config: AccuracyConfig) -> Accuracy:
    """Return the metric that a section describes."""
    return Accuracy(top=config.top, label=config.label, logits=config.logits, prefix=config.prefix)


def build_metrics(configs: Sequence[MetricConfig]) -> list[Metric]:
    """Return the metrics of the section `metrics`."""
    return [build_instance(config, f"metrics.{index}", cls=Metric) for index, config in enumerate(configs)]


def _label(inputs: Any, key: str) -> Tensor | None:
    if isinstance(inputs, Mapping):
        label = inputs.get(key, inputs.get("labels"))
    elif isinstance(inputs, tuple | list) and len(inputs) > 1:
        label = inputs[1]
    else:
        label = None
    return label if isinstance(label, Tensor) else None
