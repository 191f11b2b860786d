"""The benchmark of a step: phases are timed alone and leave nothing out, and a quick run fills its tables."""

from __future__ import annotations

import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from benchmarks.phases import Phases  # noqa: E402
from benchmarks.sharing import lengths_of  # noqa: E402


def test_a_phase_stops_the_clock_of_the_one_around_it():
    """The clock ticks once whenever it is read: begin, outer in, inner in, renamed, inner out, outer out."""
    ticks = count()
    phases = Phases(lambda: float(next(ticks)))
    with phases.phase("outer"), phases.phase("inner"):
        phases.become("renamed")
    assert phases.seconds == {"outer": 2.0, "inner": 1.0, "renamed": 1.0}
    assert phases.total == 4.0


def test_a_backward_pass_changes_hands_where_a_gradient_is_complete():
    phases, seen = Phases(lambda: 0.0), []
    phases.become = seen.append
    leaf = torch.ones(2, requires_grad=True)
    hidden = leaf * 2
    values = hidden.sum() + hidden.prod()
    phases.switch_at_gradient(hidden, "model")
    phases.switch_at_gradient(values, "log-probabilities")
    phases.switch_at_gradient(torch.ones(1), "nothing to differentiate")
    (values * 3).backward()
    assert seen == ["log-probabilities", "model"]


def test_collectives_are_counted_where_they_are_made():
    phases = Phases(lambda: 0.0)
    gather = phases.counted(lambda parts, sent: None)
    gather([], torch.zeros(4))  # outside of a phase
    with phases.phase("counts"):
        gather([torch.zeros(4)], torch.zeros(3))
        phases.counted(lambda sent: None)(torch.zeros(2, dtype=torch.int64))
    assert (phases.calls, phases.bytes) == ({"counts": 2}, {"counts": 28})


@pytest.mark.parametrize("kind", ["even", "long tail"])
def test_lengths_are_in_bounds(kind):
    lengths = lengths_of(kind, 2000, 512)
    assert int(lengths.min()) >= 2 and int(lengths.max()) == 512
    short = float((lengths < 51.2).double().mean())
    assert 0.05 < short < 0.15 if kind == "even" else 0.4 < short < 0.6


def test_a_quick_run_accounts_for_the_whole_step(tmp_path):
    out = tmp_path / "step.md"
    command = [sys.executable, str(ROOT / "scripts/bench_step.py"), "--quick", "--sections", "share", "sharing"]
    done = subprocess.run([*command, "--out", out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in out.read_text().splitlines() if "|" in line]
    losses = {row[0]: row for row in rows if len(row) == 12}
    assert {"PPO", "GSPO", "all terms"} <= losses.keys()
    phases = {row[0]: (float(row[1]), float(row[2])) for row in rows if len(row) == 3 and row[1][:1].isdecimal()}
    assert phases["head and log-probabilities"][0] == 0 < phases["head and log-probabilities"][1]
    assert phases["head and cross-entropy"][1] == 0 < phases["head and cross-entropy"][0]
    # of two turns the median is the mean, so nothing is lost but rounding to 10 ms
    for side, column in ((0, 2), (1, 3)):
        total = sum(times[side] for times in phases.values())
        assert total == pytest.approx(1e3 * float(losses["all terms"][column]), abs=6)
    shared = [row for row in rows if row[0] in ("even", "long tail")]
    assert len(shared) == 16
    for row in shared:
        microbatches, least = row[6].rstrip(")").split(" (")
        assert int(microbatches) >= int(least)
