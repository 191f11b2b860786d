"""What a run shows: plain lines, a live table, silence on other ranks."""

import io

import pytest
from rich.console import Console

from megatron_support.training.progress import (
    LiveProgress,
    PlainProgress,
    SilentProgress,
    _Clock,
    format_duration,
    make_progress,
)

VALUES = {
    "reward": 0.25,
    "loss": -0.0125,
    "policy_support_excluded_tokens": 7.0,
    "kl_penalty": 0.5,
    "grad_norm": 1.5,
    "tokens_per_second": 1234.5,
}


def console(**options) -> Console:
    return Console(file=io.StringIO(), width=120, **options)


def test_plain_lines_have_each_value_under_its_heading():
    out = console()
    view = PlainProgress(80, out)
    view.phase("sampling", 0, 1)
    view.step(80, VALUES)
    view.close()
    heading, line = out.file.getvalue().splitlines()
    cells = dict(
        zip(heading.replace("grad norm", "grad_norm").replace("time left", "left").split(), line.split(), strict=True)
    )
    assert cells == {
        "step": "80/80",
        "reward": "0.250",
        "loss": "-0.0125",
        "excluded": "7",
        "KL": "0.5000",
        "grad_norm": "1.500",
        "tokens/s": "1234",
        "left": "0:00",
    }
    assert len(heading) == len(line)


def test_what_a_loss_does_not_report_is_a_dash():
    out = console()
    view = PlainProgress(3, out)
    view.step(1, {name: value for name, value in VALUES.items() if name != "kl_penalty"})
    assert out.file.getvalue().splitlines()[1].split()[4] == "-"


def test_a_terminal_gets_a_bar_with_the_phase():
    out = console(force_terminal=True)
    view = make_progress("auto", 80, out)
    assert isinstance(view, LiveProgress)
    view.step(3, VALUES)
    view.phase("update", 1, 2)
    view.close()
    text = out.file.getvalue()
    for part in ("reward", "0.250", "step 3/80", "update 1/2", "left"):
        assert part in text


@pytest.mark.parametrize(("kind", "main"), [("off", True), ("auto", False), ("live", False), ("plain", False)])
def test_nothing_is_shown_when_off_and_on_other_ranks(kind, main):
    out = console(force_terminal=True)
    view = make_progress(kind, 3, out, main=main)
    assert isinstance(view, SilentProgress)
    view.phase("sampling", 0, 1)
    view.step(1, VALUES)
    view.close()
    assert out.file.getvalue() == ""


def test_no_terminal_gets_plain_lines():
    assert isinstance(make_progress("auto", 3, console(force_terminal=False)), PlainProgress)


def test_time_left_is_the_mean_of_the_steps_times_what_is_to_do():
    now = iter([100.0, 130.0])
    assert _Clock(12, now=lambda: next(now)).left(3) == "1:30"  # 10 s a step, 9 steps


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text
