"""Metrics that carry their own reduction.

A metric is a small frozen value holding detached scalar tensors. Two metrics of one name merge (over microbatches, then
over ranks) by the metric's own rule; nothing looks at names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Scalar = Tensor | float | int


def _scalar(value: Scalar) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    return tensor.to(torch.float64)


@dataclass(frozen=True)
class Sum:
    """A total, e.g. a count of tokens."""

    total: Scalar

    def merge(self, other: Sum) -> Sum:
        return Sum(_scalar(self.total) + _scalar(other.total))

    def compute(self) -> float:
        return float(_scalar(self.total))

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """(values to sum, values to take the maximum of), for collectives."""
        return [_scalar(self.total)], []

    def from_parts(self, sums: list[Tensor], maxima: list[Tensor]) -> Sum:
        return Sum(sums[0])


@dataclass(frozen=True)
class Mean:
    """``total / count``, where totals and counts are summed first: never a mean of means. 0 where the count is 0."""

    total: Scalar
    count: Scalar
    per: str | None = None
    """What ``count`` counts, e.g. "token": which denominator this metric has."""

    def merge(self, other: Mean) -> Mean:
        return Mean(_scalar(self.total) + _scalar(other.total), _scalar(self.count) + _scalar(other.count), self.per)

    def compute(self) -> float:
        count = float(_scalar(self.count))
        return float(_scalar(self.total)) / count if count else 0.0

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [_scalar(self.total), _scalar(self.count)], []

    def from_parts(self, sums: list[Tensor], maxima: list[Tensor]) -> Mean:
        return Mean(sums[0], sums[1], self.per)


@dataclass(frozen=True)
class Max:
    """A maximum; -inf stands for "nothing seen" and computes to 0."""

    value: Scalar

    def merge(self, other: Max) -> Max:
        return Max(torch.maximum(_scalar(self.value), _scalar(other.value)))

    def compute(self) -> float:
        value = float(_scalar(self.value))
        return 0.0 if value == -torch.inf else value

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], [_scalar(self.value)]

    def from_parts(self, sums: list[Tensor], maxima: list[Tensor]) -> Max:
        return Max(maxima[0])


@dataclass(frozen=True)
class Min:
    """A minimum; +inf stands for "nothing seen" and computes to 0."""

    value: Scalar

    def merge(self, other: Min) -> Min:
        return Min(torch.minimum(_scalar(self.value), _scalar(other.value)))

    def compute(self) -> float:
        value = float(_scalar(self.value))
        return 0.0 if value == torch.inf else value

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], [-_scalar(self.value)]

    def from_parts(self, sums: list[Tensor], maxima: list[Tensor]) -> Min:
        return Min(-maxima[0])


@dataclass(frozen=True)
class EffectiveSampleSize:
    """Kish's effective sample size of importance weights as a share of the samples, in (0, 1]; 1 for equal weights.

    Formula: ``(sum w)^2 / (n sum w^2)``; 0 where there is no weight.
    """

    total: Scalar
    squares: Scalar
    count: Scalar

    def merge(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        pairs = zip(self.parts()[0], other.parts()[0], strict=True)
        return EffectiveSampleSize(*(mine + theirs for mine, theirs in pairs))

    def compute(self) -> float:
        total, squares, count = (float(part) for part in self.parts()[0])
        return total * total / (count * squares) if count * squares else 0.0

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return [_scalar(self.total), _scalar(self.squares), _scalar(self.count)], []

    def from_parts(self, sums: list[Tensor], maxima: list[Tensor]) -> EffectiveSampleSize:
        return EffectiveSampleSize(sums[0], sums[1], sums[2])


Metric = Sum | Mean | Max | Min | EffectiveSampleSize


class MetricSet(Mapping[str, Metric]):
    """An immutable set of named metrics.

    ``compute`` is the one place where values leave the device; everything else stays free of host synchronisation.
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None) -> None:
        self._metrics = dict(metrics or {})

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"MetricSet({self._metrics!r})"

    def __or__(self, other: Mapping[str, Metric]) -> MetricSet:
        """The union; a name in both is an error (use :meth:`merge` to combine values of one name)."""
        both = self._metrics.keys() & other.keys()
        if both:
            raise ValueError(f"metric {sorted(both)} is defined twice; rename one, or merge the two sets")
        return MetricSet({**self._metrics, **other})

    def merge(self, other: MetricSet) -> MetricSet:
        """Combine with another microbatch's or rank's metrics, name by name."""
        merged = dict(self._metrics)
        for name, metric in other.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
        return MetricSet(merged)

    def compute(self) -> dict[str, float]:
        """The values as numbers."""
        return {name: metric.compute() for name, metric in self._metrics.items()}

    def pack(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """All values in name order as (float64 vector to sum, float64 vector to take the maximum of)."""
        sums: list[Tensor] = []
        maxima: list[Tensor] = []
        for name in sorted(self._metrics):
            s, m = self._metrics[name].parts()
            sums += s
            maxima += m

        def stack(values: list[Tensor]) -> Tensor:
            return (
                torch.stack([v.to(device) for v in values])
                if values
                else torch.zeros(0, dtype=torch.float64, device=device)
            )

        return stack(sums), stack(maxima)

    def unpack(self, sums: Tensor, maxima: Tensor) -> MetricSet:
        """The set with its values replaced by reduced vectors of :meth:`pack`'s layout."""
        i = j = 0
        result: dict[str, Metric] = {}
        for name in sorted(self._metrics):
            metric = self._metrics[name]
            s, m = metric.parts()
            result[name] = metric.from_parts(list(sums[i : i + len(s)]), list(maxima[j : j + len(m)]))
            i, j = i + len(s), j + len(m)
        return MetricSet(result)
