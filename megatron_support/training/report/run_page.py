"""``megatron-support report``: a run folder as one page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.progress import format_duration
from megatron_support.training.report.histogram import histogram
from megatron_support.training.report.page import render
from megatron_support.training.report.run_charts import charts
from megatron_support.training.report.run_files import RunFiles, read_run
from megatron_support.training.report.samples import describe_samples, ratio_scale
from megatron_support.training.token_record import POSITIONS, QUANTILES, SIGNS, SOURCES, view_tokens

SCATTER_POINTS = 2500
TOKENS_SHOWN = 12


def run_page(path: str | Path) -> str:
    """The page of a run.

    Args:
        path: a run folder, or a folder of them (its newest run).

    Raises:
        ConfigurationError, RolloutError: see :func:`megatron_support.training.report.run_files.read_run`.
    """
    return render("run", run_data(read_run(path)))


def run_data(run: RunFiles) -> dict[str, Any]:
    """Everything the page shows, as plain values.

    Raises:
        ConfigurationError: a file of the run lacks a field, or holds another kind of value there.
    """
    try:
        return _run_data(run)
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{run.path}: a file of it was written by another program or is damaged ({type(error).__name__}: {error}); "
            "make the run again"
        ) from error


def _run_data(run: RunFiles) -> dict[str, Any]:
    rollouts, window = run.rollouts, _window(run.recipe)
    return {
        "title": run.path.name,
        "subtitle": _subtitle(run),
        "tiles": _tiles(run),
        "steps": [step["step"] for step in run.steps],
        "charts": charts(run.steps),
        "ratio": {"window": window, **_ratio(run)},
        "ratioScale": None if rollouts is None else ratio_scale(rollouts),
        "excluded": _excluded(run),
        "scatter": _scatter(rollouts),
        "samples": [] if rollouts is None else describe_samples(rollouts),
        "text": run.text,
        "recipe": run.recipe_text,
        "environment": run.environment,
    }


def _subtitle(run: RunFiles) -> str:
    recipe, environment = run.recipe, run.environment
    loss = recipe.get("loss", {})
    parts = [
        f"{len(run.steps)} of {recipe.get('train', {}).get('steps', '?')} steps",
        f"{loss.get('surrogate', {}).get('type', '?')} on {loss.get('ratio_level', '?')} ratios",
        f"{recipe.get('advantages', {}).get('type', '?')} advantages",
    ]
    if environment:
        ranks = environment["ranks"]
        sizes = ", ".join(f"{name} {size}" for name, size in environment["layout"].items() if size > 1)
        parts.append(f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({sizes})" if sizes else ""))
        parts += [environment["processor"], environment["started"]]
    return " · ".join(parts)


def _tiles(run: RunFiles) -> list[dict[str, str]]:
    steps = run.steps
    window = max(1, min(5, len(steps) // 4))
    mean = lambda rows, name: sum(row[name] for row in rows) / len(rows)
    first, last = mean(steps[:window], "reward"), mean(steps[-window:], "reward")
    tiles = [{"label": "Reward", "value": f"{first:.3f} → {last:.3f}", "note": _averaged(window)}]
    excluded = sum(step.get("policy_support_excluded_tokens", 0.0) for step in steps)
    valid = sum(step.get("valid_tokens", 0.0) for step in steps)
    share = f"{excluded / valid:.3%}" if valid else "-"
    tiles.append(
        {"label": "Excluded tokens", "value": share, "note": f"{excluded:,.0f} of {valid:,.0f} response tokens"}
    )
    mismatch = [step["token_mult_prob_error"] for step in steps if "token_mult_prob_error" in step]
    if mismatch:
        value = f"{sum(mismatch) / len(mismatch):.4f}"
        tiles.append(
            {
                "label": "Trainer against engine",
                "value": value,
                "note": "exp |trainer - engine|, an excluded token adds 0",
            }
        )
    seconds = sum(step.get("seconds", 0.0) for step in steps)
    tokens = sum(step.get("tokens_per_second", 0.0) * step.get("seconds", 0.0) for step in steps)
    rate = f"{tokens / seconds:,.0f} tokens/s" if seconds else "-"
    tiles.append({"label": "Speed", "value": rate, "note": f"{format_duration(seconds)} in all"})
    return tiles


def _averaged(steps: int) -> str:
    return "first and last step" if steps == 1 else f"first and last {steps} steps"


def _window(recipe: dict[str, Any]) -> list[float] | None:
    """Bounds of the ratio, where the surrogate clips it."""
    surrogate = recipe.get("loss", {}).get("surrogate", {})
    if surrogate.get("type") not in ("ppo_clip", "cispo"):
        return None
    return [1 - surrogate["clip_low"], 1 + surrogate["clip_high"]]


def _ratio(run: RunFiles) -> dict[str, Any]:
    rows = [(record["step"], record["ratio"]["quantiles"]) for record in run.tokens if record["ratio"]]
    fan = None
    if rows:
        fan = {"steps": [step for step, _ in rows], "rows": [row for _, row in rows], "levels": list(QUANTILES)}
    result: dict[str, Any] = {"fan": fan, "histogram": None, "note": ""}
    view = None if run.rollouts is None else view_tokens(run.rollouts)
    if view is not None and view.log_ratio is not None and bool((kept := view.valid & ~view.excluded).any()):
        ratios = view.log_ratio[kept].exp()
        result["histogram"] = histogram(ratios, bins=60, cut=0.002)
        level = run.recipe.get("loss", {}).get("ratio_level", "token")
        note = "" if level == "token" else "; ratios of tokens, while the loss takes one a sequence"
        result["note"] = f"{len(ratios):,} tokens that are not excluded{note}"
    return result


def _excluded(run: RunFiles) -> dict[str, Any]:
    records = run.tokens
    worst = [] if run.summary is None else run.summary["excluded_tokens"]["least_likely"]
    result: dict[str, Any] = {
        "text": "Tokens that the sampling filter of one of the programs leaves no probability: they have no gradient "
        "in the actor term, and keep their KL term.",
        "worst": [
            token | {"engine": _exp(token["generation_logprob"]), "trainer": _exp(token["trainer_logprob"])}
            for token in worst
        ],
    }
    if not records:
        return result
    count = lambda record, source: sum(record["excluded"][source].values())
    result["steps"] = [{"step": r["step"], "counts": [count(r, source) for source in SOURCES]} for r in records]
    result["sources"] = [
        {"source": source, "counts": [sum(r["excluded"][source][sign] for r in records) for sign in reversed(SIGNS)]}
        for source in SOURCES
    ]
    if any(count(record, source) for record in records for source in SOURCES):
        result["positions"] = _positions(records)
        result["tokens"] = _frequent(records)
    return result


def _positions(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bins = max(len(record["positions"]["total"]) for record in records)
    rows = []
    for number in range(bins):
        total, excluded = (
            sum(r["positions"][name][number] for r in records if number < len(r["positions"][name]))
            for name in ("total", "excluded")
        )
        low = POSITIONS[number]
        high = POSITIONS[number + 1] if number + 1 < len(POSITIONS) else None
        label = f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}-{high - 1}"
        rows.append({"label": label, "total": total, "excluded": excluded, "share": excluded / total if total else 0.0})
    return rows


def _frequent(records: list[dict[str, Any]]) -> list[dict[str, int]]:
    counts: dict[str, int] = {}
    for record in records:
        for token, count in record["tokens"].items():
            counts[token] = counts.get(token, 0) + count
    order = sorted(counts.items(), key=lambda item: (-item[1], int(item[0])))
    return [{"id": int(token), "count": count} for token, count in order[:TOKENS_SHOWN]]


def _scatter(rollouts: RolloutBatch | None) -> dict[str, Any]:
    """[engine, trainer or None, sample, position, token, source] of all excluded tokens and of others, thinned."""
    if rollouts is None or rollouts.prev_logprobs is None or rollouts.generation_logprobs is None:
        return {"points": [], "note": ""}
    view = view_tokens(rollouts)
    engine = rollouts.generation_logprobs
    finite = view.valid & engine.isfinite()
    excluded = (finite & view.excluded).nonzero().flatten()
    others = (finite & ~view.excluded).nonzero().flatten()
    wanted = max(0, SCATTER_POINTS - len(excluded))
    if len(others) > wanted:  # evenly spaced: the same page for the same run
        others = others[torch.arange(wanted) * len(others) // max(wanted, 1)]
    shown = torch.cat([others, excluded[:SCATTER_POINTS]])
    sequence = rollouts.sequence_ids
    points = []
    for index in shown.tolist():
        row, previous = int(sequence[index]), float(rollouts.prev_logprobs[index])
        source = int(view.source[index])
        points.append(
            [
                round(float(engine[index]), 4),
                round(previous, 4) if math.isfinite(previous) else None,
                rollouts.sample_ids[row],
                index - int(rollouts.cu_seqlens[row]),
                int(rollouts.tokens[index]),
                SOURCES[source] if source >= 0 else None,
            ]
        )
    return {
        "points": points,
        "note": f"{len(points):,} of {int(view.valid.sum()):,} response tokens, every excluded one",
    }


def _exp(value: float | str | None) -> float | None:
    return None if value is None else math.exp(float(value))
