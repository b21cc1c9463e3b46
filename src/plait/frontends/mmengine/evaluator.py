"""Metrics of the predictions for a whole data set, computed on any number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from plait.errors import ConfigError, DataError, Problem
from plait.frontends.mmengine.dist import broadcast_object, collect_results, is_main_process
from plait.frontends.mmengine.registry import EVALUATOR, METRICS
from plait.precision import map_tensors


class BaseMetric(ABC):
    """The base class of metrics: collects the results of every batch, and computes metrics of all at the end."""

    default_prefix: str | None = None

    def __init__(self, collect_device: str = "cpu", prefix: str | None = None, collect_dir: str | None = None) -> None:
        """`collect_device` and `collect_dir` have no effect: results are gathered through the process group."""
        if collect_device not in ("cpu", "gpu"):
            raise ConfigError(Problem("metric.collect_device", f"{collect_device!r}", "Write 'cpu' or 'gpu'."))
        self.collect_device = collect_device
        self.collect_dir = collect_dir
        self.prefix = prefix or self.default_prefix
        self.results: list[Any] = []
        self.dataset_meta: dict[str, Any] | None = None

    @abstractmethod
    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        """Append the results of one batch to `results`, one entry per sample or one per batch."""

    @abstractmethod
    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return metrics by name, from the results of all ranks."""

    def evaluate(self, size: int) -> dict[str, float]:
        """Return the metrics of a data set of `size` samples, the same on every rank. Every rank must call it."""
        results = collect_results(map_tensors(lambda tensor: tensor.detach().cpu(), self.results), size)
        self.results.clear()
        metrics = self.compute_metrics(results) if is_main_process() else None
        if metrics is not None and self.prefix:
            metrics = {f"{self.prefix}/{name}": value for name, value in metrics.items()}
        metrics = broadcast_object(metrics)
        if not isinstance(metrics, Mapping):
            raise DataError(f"{type(self).__name__}.compute_metrics returned a {type(metrics).__name__}: return a dict")
        return dict(metrics)


@EVALUATOR.register_module()
class Evaluator:
    """Several metrics of the same predictions."""

    def __init__(self, metrics: Any) -> None:
        given = metrics if isinstance(metrics, Sequence) else [metrics]
        self.metrics = [METRICS.build(metric) for metric in given]
        self._dataset_meta: dict[str, Any] | None = None

    @property
    def dataset_meta(self) -> dict[str, Any] | None:
        """The `metainfo` of the data set; None if it has none."""
        return self._dataset_meta

    @dataset_meta.setter
    def dataset_meta(self, value: dict[str, Any]) -> None:
        self._dataset_meta = value
        for metric in self.metrics:
            metric.dataset_meta = value

    def process(self, data_samples: Sequence[Any], data_batch: Any = None) -> None:
        """Pass one batch and its predictions to every metric."""
        samples = [sample.to_dict() if is_element(sample) else sample for sample in data_samples]
        for metric in self.metrics:
            metric.process(data_batch, samples)

    def evaluate(self, size: int) -> dict[str, float]:
        """Return all metrics by name; raise `ConfigError` if two have the same name."""
        metrics: dict[str, float] = {}
        for metric in self.metrics:
            for name, value in metric.evaluate(size).items():
                if name in metrics:
                    message = f"two metrics have the name {name!r}"
                    raise ConfigError(Problem("evaluator.prefix", message, "Give them different prefixes."))
                metrics[name] = value
        return metrics


def build_evaluator(evaluator: Any) -> Any:
    """Return an evaluator from a metric, a list of metrics, dicts of either, or an evaluator."""
    if isinstance(evaluator, Mapping) and "metrics" in evaluator:
        return EVALUATOR.build({"type": "Evaluator", **evaluator})
    if not isinstance(evaluator, Mapping | list | tuple) and hasattr(evaluator, "metrics"):
        return evaluator
    return Evaluator(evaluator)


def is_element(sample: Any) -> bool:
    """Whether a sample is one of MMEngine's data elements."""
    return any(base.__name__ == "BaseDataElement" for base in type(sample).__mro__)
