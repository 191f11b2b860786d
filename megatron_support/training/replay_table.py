"""A replay, or two side by side, on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from megatron_support.training.replay import Replay, TokenRow, changed_tokens, worst_tokens


def print_replay(result: Replay, console: Console, text_of: Callable[[int], str], *, samples: int) -> None:
    """Loss, metrics and the worst token of the worst samples.

    Args:
        result: of :func:`megatron_support.training.replay.replay`.
        console: where to.
        text_of: readable text of a token, or the empty string.
        samples: how many.
    """
    _head(result, console)
    table = Table("metric", box=None, header_style="bold")
    table.add_column("value", justify="right")
    for name, value in {"loss": result.loss, **result.metrics}.items():
        table.add_row(name, _number(value))
    console.print(table)
    rows = worst_tokens(result, samples=samples)
    if rows:
        by = "gradient" if result.view.log_ratio is None else "ratio"
        console.print(f"\nWorst token of {len(rows)} samples, by {by}:", highlight=False)
        console.print(_token_table(rows, text_of))


def print_comparison(
    first: Replay,
    second: Replay,
    names: tuple[str, str],
    console: Console,
    text_of: Callable[[int], str],
    *,
    samples: int,
) -> None:
    """Two configurations over the same file: metrics side by side, and tokens whose gradient changed most.

    Args:
        first, second: of :func:`megatron_support.training.replay.replay`.
        names: of the two.
        console: where to.
        text_of: readable text of a token, or the empty string.
        samples: how many.
    """
    _head(first, console)
    console.print(f"A: {names[0]}\nB: {names[1]}", markup=False, highlight=False, soft_wrap=True)
    table = Table("metric", box=None, header_style="bold")
    for column in ("A", "B", "B - A"):
        table.add_column(column, justify="right")
    left, right = {"loss": first.loss, **first.metrics}, {"loss": second.loss, **second.metrics}
    for name in dict.fromkeys([*left, *right]):
        a, b = left.get(name), right.get(name)
        difference = "" if a is None or b is None else _number(b - a) if a != b else "="
        table.add_row(name, _number(a), _number(b), difference)
    console.print(table)
    changed = changed_tokens(first, second, samples=samples)
    if not changed:
        console.print("\nno token's gradient differs", highlight=False)
        return
    console.print(f"\nToken of {len(changed)} samples whose gradient changes most:", highlight=False)
    console.print(_token_table([a for a, _ in changed], text_of, [b.gradient for _, b in changed]))


def _head(result: Replay, console: Console) -> None:
    view = result.view
    excluded = int(view.excluded.sum())
    console.print(
        f"{result.rollouts.num_sequences:,} samples, {int(view.valid.sum()):,} response tokens, {excluded:,} excluded",
        highlight=False,
    )


def _token_table(rows: list[TokenRow], text_of: Callable[[int], str], others: list[float] | None = None) -> Table:
    table = Table("sample", box=None, header_style="bold", pad_edge=False)
    table.add_column("at", justify="right")
    table.add_column("token")
    gradients = ["gradient"] if others is None else ["gradient A", "gradient B"]
    for name in ("previous", "current", "ratio", "advantage", *gradients):
        table.add_column(name, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        text = text_of(row.token)
        table.add_row(
            row.sample,
            str(row.position),
            f"{row.token} {text}" if text else str(row.token),
            _number(row.previous, 4),
            _number(row.current, 4),
            "excluded" if row.excluded_by else _number(row.ratio, 4),
            _number(row.advantage, 3),
            _number(row.gradient, 2),
            *([] if others is None else [_number(others[number], 2)]),
        )
    return table


def _number(value: float | None, digits: int = 6) -> str:
    return "" if value is None else f"{value + 0.0:.{digits}g}"  # + 0.0: no -0
