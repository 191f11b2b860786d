"""The result of a check as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from megatron_support.config.path_text import check_target
from megatron_support.errors import ConfigurationError
from megatron_support.training.check_layouts.compare import (
    GRADIENT_TOLERANCE,
    LOGPROB_TOLERANCE,
    METRIC_TOLERANCE,
    Row,
)

_HEADINGS: dict[str, Literal["left", "right"]] = {
    **dict.fromkeys(("layout", "microbatch", "step"), "left"),
    **dict.fromkeys(("loss", "gradient", "logprob", "support", "seconds"), "right"),
    "result": "left",
}
_WIDTH = 140
"""Columns of a table that goes to a file."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What rank 0 knows at the end."""

    world: int
    model: str
    sequences: int
    response_tokens: int
    excluded_tokens: int
    """In one process."""
    boundary_tokens: int
    """Left out of the responses: rounding decides whether they are in the support."""
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        tolerances = {"gradient": GRADIENT_TOLERANCE, "logprob": LOGPROB_TOLERANCE, "metric": METRIC_TOLERANCE}
        return dataclasses.asdict(self) | {
            "ok": self.ok,
            "rows": [dataclasses.asdict(row) | {"ok": row.ok} for row in self.rows],
            "tolerances": tolerances,
        }


def print_report(report: Report, console: Console) -> None:
    """The heading, one line for each step, and the answer."""
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(
        f"{report.model}; {report.sequences} sequences, {report.response_tokens} response tokens, "
        f"{report.excluded_tokens} of them excluded; "
        f"{report.boundary_tokens} at the boundary of their support left out",
        highlight=False,
    )
    console.print(_table(report.rows, console))
    for row in report.rows:
        if not row.ok:
            console.print(
                f"{row.layout}, {row.batch}, {row.loss_name}: {_problems(row)}", markup=False, highlight=False
            )
    differing = sum(not row.ok for row in report.rows)
    console.print(
        f"{len(report.rows)} step{'s' if len(report.rows) > 1 else ''}, {differing} differ from one process; "
        "gradient: largest difference relative to the "
        f"tensor's largest entry (up to {GRADIENT_TOLERANCE:.0e}); logprob: largest difference "
        f"(up to {LOGPROB_TOLERANCE:.0e}); support: tokens inside for one and outside for the other",
        highlight=False,
    )


def require_writable(path: str) -> None:
    """Find out before the work whether the report can be written.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        check_target(Path(path))
        Path(path).touch()
    except OSError as error:
        raise ConfigurationError(
            f"--json {path}: cannot write it ({error}); give a file in a writable folder"
        ) from None


def write_json(report: Report, path: str) -> None:
    Path(path).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")


def _table(rows: Sequence[Row], console: Console) -> Table:
    """One line for each step; a narrow terminal leaves out what says least."""
    cells = [_cells(row) for row in rows]
    for left_out in ((), ("seconds",), ("seconds", "loss")):
        table = Table(box=None, pad_edge=False)
        shown = [heading for heading in _HEADINGS if heading not in left_out]
        for heading in shown:
            table.add_column(heading, justify=_HEADINGS[heading], no_wrap=True)
        for row in cells:
            table.add_row(*(row[heading] for heading in shown))
        if console.measure(table).maximum < console.width:
            break
    return table


def _cells(row: Row) -> dict[str, str]:
    numbers = dict.fromkeys(("loss", "gradient", "logprob", "support"), "-")
    if row.loss is not None:
        numbers = {
            "loss": f"{row.loss:+.6f}",
            "gradient": f"{row.gradient_difference:.1e}",
            "logprob": f"{row.logprob_difference:.1e}",
            "support": "equal" if not row.support_differs else f"{row.support_differs} differ",
        }
    names = {"layout": row.layout, "microbatch": row.batch, "step": row.loss_name}
    result = "[green]ok[/]" if row.ok else "[bold red]DIFFERS[/]"
    return {**names, **numbers, "seconds": f"{row.seconds:.1f}", "result": result}


def _problems(row: Row) -> str:
    more = f" and {len(row.problems) - 3} more" if len(row.problems) > 3 else ""
    return ", ".join(row.problems[:3]) + more
