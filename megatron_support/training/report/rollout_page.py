"""``megatron-support inspect``: a rollout file before training, on a terminal and as one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_support.errors import RolloutError
from megatron_support.rollouts.batch import RolloutBatch, shortest_decimal
from megatron_support.training.report.findings import Finding, find_odd
from megatron_support.training.report.histogram import histogram
from megatron_support.training.report.page import render
from megatron_support.training.report.samples import describe_samples

_BARS = " ▁▂▃▄▅▆▇█"


def rollout_page(
    path: str | Path,
    rollouts: RolloutBatch | None,
    errors: Sequence[RolloutError],
    text: Mapping[int, str] | None = None,
) -> str:
    """The page of a rollout file.

    Args:
        path: its name.
        rollouts: the sound rows, from :func:`megatron_support.rollouts.files.read_sound_rollouts`.
        errors: what is wrong with the others.
        text: of tokens by id; where it is missing the page shows ids.
    """
    return render("rollouts", rollout_data(path, rollouts, errors, text or {}))


def rollout_data(
    path: str | Path, rollouts: RolloutBatch | None, errors: Sequence[RolloutError], text: Mapping[int, str]
) -> dict[str, Any]:
    """Everything the page shows, as plain values."""
    findings = find_odd(rollouts, errors)
    odd = [row for finding in findings for row in finding.rows]
    return {
        "title": Path(path).name,
        "subtitle": str(path),
        "tiles": [] if rollouts is None else _tiles(rollouts, errors),
        "findings": [asdict(finding) for finding in findings],
        "histograms": [] if rollouts is None else _histograms(rollouts),
        "filters": [] if rollouts is None else _filters(rollouts),
        "ratioScale": None,
        "samples": [] if rollouts is None else describe_samples(_as_sampled(rollouts), first=odd),
        "text": {}
        if rollouts is None
        else {token: text[token] for token in set(rollouts.tokens.tolist()) & text.keys()},
    }


def print_rollouts(
    path: str | Path, rollouts: RolloutBatch | None, errors: Sequence[RolloutError], console: Console
) -> None:
    """The same on a terminal."""
    # a terminal gets whole words, a file whole lines
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    say(str(path))
    if rollouts is not None:
        for tile in _tiles(rollouts, errors):
            say(f"  {tile['label']:<18}{tile['value']:>14}  {tile['note']}")
        say("")
        for chart in _histograms(rollouts):
            if chart.get("counts"):
                say(f"  {chart['title']:<28}{_spark(chart['counts'])}  {_ends(chart['edges'])}")
        say("")
        console.print(_filter_table(rollouts))
    _print_findings(find_odd(rollouts, errors), say)


def _print_findings(findings: list[Finding], say: Any) -> None:
    say("")
    for finding in findings:
        if finding.level == "error":
            say(f"  error    {finding.text}")
        else:
            rows = f"{finding.count} row{'s' if finding.count > 1 else ''}"
            more = ", ..." if finding.count > len(finding.examples) else ""
            say(f"  {rows:<9}{finding.text} ({', '.join(finding.examples)}{more})")
    if not findings:
        say("  nothing is missing and nothing is odd")


def _as_sampled(rollouts: RolloutBatch) -> RolloutBatch:
    """Without what a trainer has added: the page is about the sampler."""
    return rollouts.with_columns(prev_logprobs=None, prev_logprobs_unfiltered=None, curr_logprobs=None)


def _tiles(rollouts: RolloutBatch, errors: Sequence[RolloutError]) -> list[dict[str, str]]:
    lengths = _response_lengths(rollouts)
    groups = int(rollouts.group_ids.unique().numel())
    refused = f"{len(errors)} refused" if errors else "all sound"
    tiles = [
        {"label": "Rows", "value": f"{rollouts.num_sequences:,}", "note": refused},
        {"label": "Prompts", "value": f"{groups:,}", "note": f"{rollouts.num_sequences / groups:.3g} samples each"},
        {
            "label": "Response tokens",
            "value": f"{int(lengths.sum()):,}",
            "note": f"{float(lengths.double().mean()):.1f} a row, longest {int(lengths.max())}",
        },
        {
            "label": "Mean reward",
            "value": f"{float(rollouts.rewards.mean()):.3f}",
            "note": f"{float(rollouts.rewards.min()):.3g} to {float(rollouts.rewards.max()):.3g}",
        },
        {
            "label": "Filtered rows",
            "value": f"{float(rollouts.filtering.double().mean()):.0%}",
            "note": "kept sets recorded" if rollouts.support is not None else "no kept sets",
        },
    ]
    return tiles


def _response_lengths(rollouts: RolloutBatch) -> Tensor:
    counts = torch.zeros(rollouts.num_sequences, dtype=torch.int64)
    return counts.index_add_(0, rollouts.sequence_ids, rollouts.response_mask.long())


def _histograms(rollouts: RolloutBatch) -> list[dict[str, Any]]:
    lengths = _response_lengths(rollouts)
    logprobs = rollouts.generation_logprobs
    assert logprobs is not None
    logprobs = logprobs[rollouts.response_mask]
    finite = logprobs[logprobs > -torch.inf]
    rows: list[tuple[str, str, Tensor | None, str]] = [
        ("response-length", "Response length", lengths, "tokens"),
        ("prompt-length", "Prompt length", rollouts.lengths - lengths, "tokens that are no response"),
        ("reward", "Reward", rollouts.rewards, "reward"),
        ("generation", "Generation log-probability", finite, "log-probability, filtered"),
    ]
    if rollouts.support is not None:
        sizes = rollouts.support.offsets.diff()[rollouts.response_mask]
        rows.append(("support", "Support size", sizes, "tokens that the sampler kept"))
    return [
        {"id": name, "title": title, "xLabel": label, **(histogram(values, bins=30) or {"none": "no values"})}
        for name, title, values, label in rows
        if values is not None
    ]


def _filters(rollouts: RolloutBatch) -> list[dict[str, Any]]:
    """Distinct sampling parameters with their number of rows, most frequent first."""
    rows = zip(rollouts.temperature.tolist(), rollouts.top_k.tolist(), rollouts.top_p.tolist(), strict=True)
    return [
        {
            "temperature": shortest_decimal(temperature),
            "top_k": top_k or None,
            "top_p": shortest_decimal(top_p),
            "rows": count,
        }
        for (temperature, top_k, top_p), count in Counter(rows).most_common(20)
    ]


def _filter_table(rollouts: RolloutBatch) -> Table:
    table = Table(box=None, pad_edge=False, title="sampling parameters", title_justify="left")
    for heading in ("temperature", "top_k", "top_p", "rows"):
        table.add_column(heading, justify="right")
    for row in _filters(rollouts):
        table.add_row(f"{row['temperature']:g}", str(row["top_k"] or "none"), f"{row['top_p']:g}", str(row["rows"]))
    return table


def _spark(counts: list[int]) -> str:
    top = max(counts)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] for count in counts)


def _ends(edges: list[float]) -> str:
    return f"{edges[0]:.4g} to {edges[-1]:.4g}"
