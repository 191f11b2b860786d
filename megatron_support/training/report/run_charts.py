"""Which metrics a run's page draws over steps, and how they are named there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart over steps. A metric that no step has is left out, and with the last one the chart."""

    id: str
    title: str
    axis: str
    series: Mapping[str, str]
    """Metric -> name in the legend."""
    hint: str = ""
    percent: bool = False
    zero: bool = False
    """Whether the axis begins at 0."""


_COLORS = ("c1", "c2", "c3", "c4", "c5", "c6")

CHARTS: dict[str, tuple[Chart, ...]] = {
    "training": (
        Chart(id="reward", title="Reward", axis="mean reward", series={"reward": "reward"}),
        Chart(id="loss", title="Loss", axis="loss", series={"loss": "loss"}),
        Chart(
            id="kl",
            title="KL to the reference",
            axis="nats",
            series={"kl_penalty": "KL"},
            hint="unfiltered log-probabilities, excluded tokens included",
            zero=True,
        ),
        Chart(
            id="entropy",
            title="Entropy",
            axis="nats",
            series={"entropy": "over the vocabulary", "approx_entropy": "estimated from sampled tokens"},
            zero=True,
        ),
        Chart(
            id="clip",
            title="Clipped tokens",
            axis="share of tokens",
            series={"clip_fraction_high": "above the window", "clip_fraction_low": "below"},
            percent=True,
            zero=True,
        ),
        Chart(id="grad_norm", title="Gradient norm", axis="before clipping", series={"grad_norm": "norm"}, zero=True),
        Chart(
            id="length",
            title="Response length",
            axis="tokens",
            series={"response_length": "mean"},
            zero=True,
        ),
        Chart(id="lr", title="Learning rate", axis="lr", series={"lr": "learning rate"}, zero=True),
        Chart(
            id="skipped",
            title="Skipped updates",
            axis="updates",
            series={"skipped_updates": "skipped"},
            hint="no rank held a valid token",
            zero=True,
        ),
    ),
    "ratio": (
        Chart(
            id="ratio-mean",
            title="Mean ratio",
            axis="ratio",
            series={"probs_ratio": "as it is", "probs_ratio_clamped": "inside the window"},
            hint="over all response tokens: an excluded one adds 0",
        ),
        Chart(
            id="excluded-share",
            title="Excluded, by sign of the advantage",
            axis="share of those tokens",
            series={"excluded_share_positive": "advantage > 0", "excluded_share_negative": "advantage < 0"},
            percent=True,
            zero=True,
        ),
    ),
    "agreement": (
        Chart(
            id="mismatch",
            title="How far apart",
            axis="exp |trainer - engine|",
            series={"token_mult_prob_error": "mean"},
            hint="token_mult_prob_error; an excluded token adds 0",
        ),
        Chart(
            id="mismatch-kl",
            title="Divergence",
            axis="nats",
            series={
                "gen_kl_error": "KL(engine || trainer)",
                "policy_kl_error": "KL(trainer || engine)",
                "js_divergence_error": "Jensen-Shannon",
            },
            zero=True,
        ),
        Chart(
            id="ess",
            title="Effective sample size",
            axis="share of tokens",
            series={"effective_sample_size": "of trainer / engine weights"},
            percent=True,
        ),
    ),
    "time": (
        Chart(
            id="seconds",
            title="Time of a step",
            axis="seconds",
            series={
                "seconds/rollouts": "rollouts",
                "seconds/previous": "previous pass",
                "seconds/reference": "reference pass",
                "seconds/update": "update",
                "seconds/communication": "communication in it",
            },
            zero=True,
        ),
        Chart(id="speed", title="Speed", axis="tokens/s", series={"tokens_per_second": "tokens/s"}, zero=True),
        Chart(
            id="memory",
            title="Memory",
            axis="GiB",
            series={"memory_gib": "peak of the fullest rank"},
            zero=True,
        ),
        Chart(
            id="mfu",
            title="Model FLOPs utilisation",
            axis="share of the peak",
            series={"mfu": "MFU"},
            percent=True,
            zero=True,
        ),
    ),
}


def charts(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The charts of each section, as the page's script wants them.

    Args:
        steps: metrics of each step.
    """
    return {name: [found for chart in row if (found := _chart(chart, steps))] for name, row in CHARTS.items()}


def _chart(chart: Chart, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    series = [
        {"name": label, "color": color, "values": [_number(step.get(metric)) for step in steps]}
        for (metric, label), color in zip(chart.series.items(), _COLORS, strict=False)
        if any(metric in step for step in steps)
    ]
    if not series or (chart.id == "skipped" and not any(series[0]["values"])):
        return None
    return {
        "id": chart.id,
        "title": chart.title,
        "hint": chart.hint,
        "yLabel": chart.axis,
        "percent": chart.percent,
        "zero": chart.zero,
        "series": series,
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
