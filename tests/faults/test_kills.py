"""Kills at seeded moments: nothing is lost but steps since the last checkpoint, and the end is the same bit by bit."""

from __future__ import annotations

import pytest

from tests.faults import runs
from tests.faults.kills import PARTS, Kill, KilledRun, draw_kills, run_with_kills
from tests.faults.runs import LAYOUTS, STEPS, assert_same, metrics, names
from tests.ranks import run_ranks

EVERY = 2
# what is drawn in one run; together every part, and the five of the issue under asynchronous saves too
RUNS = {
    "DP2": (LAYOUTS["DP2"], [*list(PARTS)[:5], "metrics of a step"]),
    "PP2, saves beside": (
        [*LAYOUTS["PP2"], "checkpoint.async_save=true"],
        ["sampling", "save", *list(PARTS)[5:8], "end of the run"],
    ),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> dict[str, KilledRun]:
    """The runs by their name, and one whose first rank dies when the summary is written and the other has gone."""
    folder = tmp_path_factory.mktemp("killed")
    found = {
        case: KilledRun(folder / case, overrides, draw_kills(sum(map(ord, case)), parts, ranks=2, every=EVERY))
        for case, (overrides, parts) in RUNS.items()
    }
    found["ended"] = KilledRun(folder / "ended", ["train.steps=2"], [Kill("after the summary", 0, 1, 0.2)])
    run_with_kills(list(found.values()), ranks=2)
    return found


@pytest.mark.parametrize("case", RUNS)
def test_the_end_is_that_of_an_undisturbed_run(case, killed, tmp_path):
    overrides, parts = RUNS[case]
    events = killed[case].events()
    assert [event["part"] for event in events if event["event"] == "kill"] == parts, "each died where it should"

    run_ranks(2, runs.run, tmp_path / "straight", overrides)
    straight = runs.only_run(tmp_path / "straight")
    *cut_off, last = sorted((killed[case].folder / "runs").iterdir())
    assert not any((run / "checkpoints" / "latest").exists() for run in cut_off), "they died before their first one"
    assert_same(last, straight)
    assert metrics(last) == metrics(straight)
    assert names(last) == names(straight) == ["latest", f"step_{STEPS - EVERY}", f"step_{STEPS}"]
    _check_losses(events, late=EVERY if "checkpoint.async_save=true" in overrides else 0)


def test_a_run_that_has_ended_is_not_begun_again(killed):
    assert [event["step"] for event in killed["ended"].events() if event["event"] == "step"] == [1, 2]
    assert (runs.only_run(killed["ended"].folder) / "summary.json").exists()


def _check_losses(events: list[dict], *, late: int) -> None:
    """A start repeats at most the steps since the last checkpoint, which is an interval behind where it is late."""
    steps = [[e["step"] for e in events if e["event"] == "step" and e["attempt"] == a] for a in range(len(events))]
    last = 0
    for done in filter(None, steps):
        assert last + 1 >= done[0] > last - EVERY - late, steps
        last = done[-1]
    assert last == STEPS
