"""What a run says at its end. The last line is ``reward <first> -> <last>``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_support.config.recipe import Recipe
from megatron_support.training.exclusions import ExcludedToken, Exclusions
from megatron_support.training.folder import METRICS, ROLLOUTS, TENSORBOARD
from megatron_support.training.saved import CHECKPOINT

_SOURCES = {
    "previous": "outside the trainer's support before the step",
    "generation": "-inf in the engine's own log-probabilities",
    "current": "outside the support after earlier minibatches of the step",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run, the same on every rank."""

    recipe: Recipe
    rewards: list[float]
    """Mean reward of each step."""
    exclusions: Exclusions
    mismatch: float | None
    """Mean over the steps of ``token_mult_prob_error``; None where the loss does not report it."""
    last: dict[str, float]
    """Metrics of the last step."""
    folder: Path

    @property
    def window(self) -> int:
        """Steps that the first and the last reward are means of: a quarter of the run, from 1 to 5."""
        return max(1, min(5, len(self.rewards) // 4))

    @property
    def first_reward(self) -> float:
        return sum(self.rewards[: self.window]) / self.window

    @property
    def last_reward(self) -> float:
        return sum(self.rewards[-self.window :]) / self.window

    def to_dict(self) -> dict[str, Any]:
        exclusions = self.exclusions
        return {
            "name": self.recipe.name,
            "steps": len(self.rewards),
            "reward": {"first": self.first_reward, "last": self.last_reward, "steps_averaged": self.window},
            "excluded_tokens": {
                "total": exclusions.total,
                **exclusions.sources(),
                "response_tokens": exclusions.response_tokens,
                "least_likely": [asdict(token) for token in exclusions.worst],
            },
            "token_mult_prob_error": self.mismatch,
            "last_step": {name: value if math.isfinite(value) else str(value) for name, value in self.last.items()},
        }


def print_summary(summary: Summary, console: Console, text_of: Callable[[int], str]) -> None:
    """Print it.

    Args:
        summary: of the run.
        console: where to.
        text_of: readable text of a token, or the empty string.
    """
    say = lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)
    exclusions = summary.exclusions
    say("")
    if exclusions.worst:
        console.print(_table(exclusions.worst, text_of))
    if summary.mismatch is not None:
        say(f"token_mult_prob_error {summary.mismatch:.4f}, mean of exp|trainer - engine| (an excluded token adds 0)")
    share = exclusions.total / exclusions.response_tokens if exclusions.response_tokens else 0.0
    say(f"excluded tokens {exclusions.total} of {exclusions.response_tokens} response tokens ({share:.3%})")
    for source, count in exclusions.sources().items():
        say(f"  {source:<11}{count:>7}  {_SOURCES[source]}")
    checkpoint = f", {CHECKPOINT}/" if summary.recipe.train.save_final else ""
    board = f", {TENSORBOARD}/" if summary.recipe.logging.tensorboard else ""
    say(f"files in {summary.folder}: {METRICS}{board}, {ROLLOUTS}, recipe.yaml, summary.json{checkpoint}")
    say(f"reward {summary.first_reward:.3f} -> {summary.last_reward:.3f}")


def _table(tokens: tuple[ExcludedToken, ...], text_of: Callable[[int], str]) -> Table:
    table = Table(title="excluded tokens that the trainer finds least likely", title_justify="left", box=None)
    for heading in ("step", "sample", "position", "token", "text", "outside", "p engine", "p trainer"):
        table.add_column(heading, justify="left" if heading in ("text", "outside") else "right")
    for token in tokens:
        table.add_row(
            str(token.step),
            token.sample_id,
            str(token.position),
            str(token.token),
            _escaped(text_of(token.token)),
            token.source,
            _probability(token.generation_logprob),
            _probability(token.trainer_logprob),
        )
    table.caption = "p engine: under its filter; p trainer: over the whole vocabulary"
    table.caption_justify = "left"
    return table


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")


def _probability(logprob: float | None) -> str:
    return "-" if logprob is None else f"{math.exp(logprob):.5f}"
