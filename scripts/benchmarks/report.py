"""Markdown tables and the plot."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .contestants import CROSS_ENTROPY, FUSED, HEAD_FIRST, IN_PLACE, OURS, PEER, SORT, VERL
from .measure import Case, Measured, ratio
from .work import Work

Row = dict[Case, Measured]
_RIVALS = (SORT, CROSS_ENTROPY, VERL, PEER)


def machine() -> str:
    """The processor's name, cores and the load that others made."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    name = names[0] if names else platform.machine()
    return (
        f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; one thread a rank, torch {torch.__version__}"
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def by_name(row: Row) -> tuple[Work, dict[str, Measured]]:
    """A row whose cases are one piece of work."""
    return next(iter(row)).work, {case.name: measured for case, measured in row.items()}


def times(measured: Measured) -> str:
    return "{:.1f} + {:.1f}".format(*measured.best)


def work_table(rows: Sequence[Row], ranks: int, memory: dict[Case, float]) -> list[str]:
    """Ours in milliseconds, and how many times longer the others took (in brackets: than ours in place)."""
    present = [name for name in _RIVALS if any(name in by_name(row)[1] for row in rows)]
    header = ["V", "T", "dtype", "logits", "work", "ours, ms", "in place, ms", *(f"{name} / ours" for name in present)]
    header += ["bytes a token (collectives)"] if ranks > 1 else []
    header += ["peak MiB (in place), logits MiB"] if memory else []
    cells = []
    for row in rows:
        work, found = by_name(row)
        line = [work.vocabulary, work.tokens, work.dtype, work.kind, work.label, times(found[OURS])]
        line += [times(found[IN_PLACE]), *(_against(found, name) for name in present)]
        line += [f"{found[OURS].bytes:.0f} ({found[OURS].calls})"] if ranks > 1 else []
        if memory:
            peaks = [memory.get(Case(work, name)) for name in (OURS, IN_PLACE)]
            line.append("" if None in peaks else f"{peaks[0]:.0f} ({peaks[1]:.0f}), {work.logits_mib(ranks):.0f}")
        cells.append(line)
    return markdown(header, cells)


def _against(found: dict[str, Measured], name: str) -> str:
    if name not in found:
        return ""
    return f"{ratio(found[OURS], found[name]):.2f}x ({ratio(found[IN_PLACE], found[name]):.2f}x)"


def top_k_table(rows: Sequence[Row], ranks: int) -> list[str]:
    """Every k's time over that of k = 50."""
    header = ["V", "T", "logits", "work", "ours, ms", "over top_k 50", *(["bytes a token"] if ranks > 1 else [])]
    cells = []
    for row in rows:
        base = next(measured for case, measured in row.items() if case.work.top_k == 50)
        for case, measured in row.items():
            work = case.work
            line = [work.vocabulary, work.tokens, work.kind, work.label, times(measured)]
            line += [f"{ratio(base, measured):.2f}x", *([f"{measured.bytes:.0f}"] if ranks > 1 else [])]
            cells.append(line)
    return markdown(header, cells)


def growth_table(rows: Sequence[Row]) -> list[str]:
    """Time per logit of growing work; a cost linear in T and V is a constant column."""
    cells = []
    for row in rows:
        first = next(iter(row.values()))
        smallest = next(iter(row)).work
        for case, measured in row.items():
            work = case.work
            size = work.tokens * work.vocabulary
            share = ratio(first, measured) * smallest.tokens * smallest.vocabulary / size
            cost = measured.milliseconds * 1e6 / size
            cells.append([work.kind, work.label, work.vocabulary, work.tokens, f"{cost:.2f}", f"{share:.2f}x"])
    return markdown(["logits", "work", "V", "T", "ours, ns a logit", "over the first"], cells)


def head_table(rows: Sequence[Row], memory: dict[Case, float]) -> list[str]:
    """The fused head beside the head's product followed by ours, and what response tokens alone save."""
    cells = []
    for row in rows:
        whole = {case.name: measured for case, measured in row.items() if case.work.response == 1}
        for case, measured in row.items():
            work, peak = case.work, memory.get(case)
            line = [case.name, work.vocabulary, work.hidden, work.tokens, f"{work.response:.0%}", times(measured)]
            line += [f"{ratio(measured, whole[HEAD_FIRST]):.2f}x" if work.response == 1 else ""]
            line += [f"{ratio(measured, whole[case.name]):.2f}x" if work.response < 1 else ""]
            cells.append([*line, "" if peak is None else f"{peak:.0f}"])
    header = ["way", "V", "H", "T", "response tokens", "ms", f"{HEAD_FIRST} / this", "all tokens / this", "peak MiB"]
    return markdown(header, cells)


def response_table(rows: Sequence[Row]) -> list[str]:
    """What a response mask saves where logits are given."""
    cells = []
    for row in rows:
        whole = next(measured for case, measured in row.items() if case.work.response == 1)
        for case, measured in row.items():
            work = case.work
            gain = f"{ratio(measured, whole):.2f}x"
            mask = "all tokens" if work.response == 1 else f"{1 / work.response - 1:g}:1"
            cells.append([work.kind, work.label, work.tokens, mask, times(measured), gain])
    return markdown(["logits", "work", "T", "prompt:response", "ours, ms", "all tokens / this"], cells)


_COLOURS = {
    OURS: "#1b6ca8",
    IN_PLACE: "#6db3e0",
    FUSED: "#1b6ca8",
    CROSS_ENTROPY: "#e08e2b",
    VERL: "#8a5fb0",
    PEER: "#4f9d69",
    SORT: "#b23a48",
}


def plot(rows: Sequence[Row], floor: tuple[float, float], path: Path) -> None:
    """One line for each piece of work, one dot for each contestant, on a logarithmic axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "support"
    import matplotlib.pyplot as plt

    found = [by_name(row) for row in rows]
    names = [name for name in _COLOURS if any(name in measured for _, measured in found)]
    figure, axes = plt.subplots(figsize=(9, 0.36 * len(rows) + 1.6), layout="constrained")
    axes.axvspan(*floor, color="#dddddd", label="floor: one read, one read and write")
    for place, (_, measured) in enumerate(found):
        ends = [m.milliseconds for m in measured.values()]
        axes.plot([min(ends), max(ends)], [place, place], color="#c8c8c8", linewidth=1.2, zorder=1)
        if SORT in measured:
            text = f" {ratio(measured[OURS], measured[SORT]):.0f}x"
            axes.text(measured[SORT].milliseconds * 1.06, place, text, va="center", fontsize=8, color=_COLOURS[SORT])
    for name in names:
        dots = [(m[name].milliseconds, i) for i, (_, m) in enumerate(found) if name in m]
        axes.scatter(*zip(*dots, strict=True), s=46, color=_COLOURS[name], edgecolor="white", linewidth=0.6, label=name)
    axes.set_yticks(range(len(found)), [f"{work.kind}:  {work.label}" for work, _ in found], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=axes.get_xlim()[1] * 1.5)
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    work = found[0][0]
    axes.set_xlabel("forward + backward, ms")
    axes.set_title(f"V = {work.vocabulary:,}, T = {work.tokens}, {work.dtype}, one CPU thread", fontsize=10, loc="left")
    axes.legend(fontsize=8, frameon=False, ncols=len(names) + 1, loc="upper center", bbox_to_anchor=(0.4, -0.1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
