"""What a run shows while it works: a live table and bar on a terminal, one line a step elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

Values = Mapping[str, float]

# heading, width, text of a step's values
_COLUMNS: tuple[tuple[str, int, Callable[[Values], str]], ...] = (
    ("reward", 7, lambda values: f"{values['reward']:.3f}"),
    ("loss", 9, lambda values: f"{values['loss']:+.4f}"),
    ("excluded", 9, lambda values: _optional(values, "policy_support_excluded_tokens", "{:.0f}")),
    ("KL", 8, lambda values: _optional(values, "kl_penalty", "{:.4f}")),
    ("grad norm", 10, lambda values: f"{values['grad_norm']:.3f}"),
    ("tokens/s", 9, lambda values: f"{values['tokens_per_second']:.0f}"),
)


class ProgressView(Protocol):
    """What the loop tells about itself."""

    def phase(self, name: str, done: int, total: int) -> None:
        """A part of the present step: sampling, previous, reference, update."""
        ...

    def step(self, step: int, values: Values) -> None:
        """Step 1, 2, ... is done."""
        ...

    def close(self) -> None: ...


def make_progress(
    kind: Literal["auto", "live", "plain", "off"], steps: int, console: Console, *, main: bool = True
) -> ProgressView:
    """The view for this rank.

    Args:
        kind: auto is live on a terminal and plain elsewhere.
        steps: of the whole run.
        console: where to.
        main: whether this rank speaks for all.
    """
    if not main or kind == "off":
        return SilentProgress()
    if kind == "live" or (kind == "auto" and console.is_terminal):
        return LiveProgress(steps, console)
    return PlainProgress(steps, console)


class SilentProgress:
    """Shows nothing."""

    def phase(self, name: str, done: int, total: int) -> None: ...

    def step(self, step: int, values: Values) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """A heading, then one line a step."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps, self._console = steps, console
        self._width = max(4, 2 * len(str(steps)) + 1)
        self._clock = _Clock(steps)
        cells = [
            "step".rjust(self._width),
            *(heading.rjust(width) for heading, width, _ in _COLUMNS),
            "time left".rjust(11),
        ]
        self._print("".join(cells))

    def phase(self, name: str, done: int, total: int) -> None: ...

    def step(self, step: int, values: Values) -> None:
        cells = [
            f"{step}/{self._steps}".rjust(self._width),
            *(text(values).rjust(width) for _, width, text in _COLUMNS),
        ]
        self._print("".join([*cells, self._clock.left(step).rjust(11)]))

    def close(self) -> None: ...

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """The last step's values above a bar that also names the present phase."""

    def __init__(self, steps: int, console: Console) -> None:
        self._clock = _Clock(steps)
        self._values: Values | None = None
        self._bar = Progress(
            BarColumn(bar_width=40),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[left]} left"),
            TextColumn("[dim]{task.fields[phase]}"),
            console=console,
        )
        self._task: TaskID = self._bar.add_task("", total=steps, phase="", left="-")
        self._live = Live(self._render(), console=console, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        label = f"{name} {done}/{total}" if total > 1 else name
        self._bar.update(self._task, phase=label)

    def step(self, step: int, values: Values) -> None:
        self._values = values
        self._bar.update(self._task, completed=step, left=self._clock.left(step), phase="")
        self._live.update(self._render())

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading, width, _ in _COLUMNS:
            table.add_column(heading, justify="right", min_width=width)
        table.add_row(*(text(self._values) if self._values else "-" for _, _, text in _COLUMNS))
        return Group(table, self._bar)


class _Clock:
    """Time left, from the mean of the steps so far."""

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._now = steps, now
        self._start = now()

    def left(self, done: int) -> str:
        return format_duration((self._now() - self._start) / done * (self._steps - done))


def format_duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _optional(values: Values, name: str, form: str) -> str:
    return form.format(values[name]) if name in values else "-"
