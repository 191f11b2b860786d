"""The soak script: what grows is named, what does not is no fault, a short run is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from soak import Samples, compare, disk_rows, parse  # noqa: E402

STEPS, WARMUP = 100, 20


def samples(**changed: list) -> Samples:
    """Of a rank that stays as it began after some loud first steps; fields can be put in their place."""
    flat = {
        "memory": [900.0] * WARMUP + [400.0] * (STEPS - WARMUP),
        "files": [99] * WARMUP + [12] * (STEPS - WARMUP),
        "threads": [9] * WARMUP + [3] * (STEPS - WARMUP),
        "wall": [0.5 * step for step in range(STEPS)],
        "processor": [0.25 * step for step in range(STEPS)],
    }
    return Samples(**{**flat, **changed})


def test_what_stays_as_it_began_has_no_fault():
    rows, faults = compare(samples(), WARMUP)
    assert faults == []
    assert rows[0] == ["memory, MiB", "400.000", "400.000", "+0.00%"]
    assert rows[1] == ["processor time of a step, s", "0.250", "0.250", "+0.00%"]
    assert rows[2] == ["time of a step, s", "0.500", "0.500", "+0.00%"]


def test_memory_may_grow_by_one_percent():
    """From the middle of the first quarter to the middle of the last are 60 steps."""
    leak = lambda whole: samples(memory=[400.0 + whole * max(0, step - WARMUP) / 60 for step in range(STEPS)])
    assert compare(leak(3.9), WARMUP)[1] == []
    (fault,) = compare(leak(4.5), WARMUP)[1]
    assert fault.startswith("memory has grown by 1.1")
    (fault,) = compare(leak(40), WARMUP)[1]
    assert fault.startswith("memory has grown by 9.")


@pytest.mark.parametrize("name", ["files", "threads"])
def test_one_more_at_the_end_is_a_fault(name):
    counts = [5] * (STEPS - 3) + [6] * 3
    (fault,) = compare(samples(**{name: counts}), WARMUP)[1]
    assert fault == f"{'open files' if name == 'files' else name} have become more: 6 after 5"


def test_a_step_that_takes_longer_is_shown():
    wall = [float(step**2) for step in range(STEPS)]
    rows, faults = compare(samples(wall=wall), WARMUP)
    assert rows[2][1:3] == ["59.000", "179.000"] and faults == []


def test_disk_has_the_most_there_was():
    looks = [{"a": 1024 * size} for size in (1, 2, 9, 3, 3, 3, 3, 3, 3, 3)]
    rows = disk_rows(samples(disk=looks), WARMUP, {"a": 4096, "b": 2048})
    assert rows == [["a", "9", "9", "4"], ["b", "0", "2", "2"], ["all", "9", "9", "6"]]


def test_too_few_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["--steps", "20", "--warmup", "10"])
    assert "--steps must be >= --warmup + 12 (10 + 12), got 20; raise it" in capsys.readouterr().err


def test_a_short_run_fills_the_tables():
    """Two ranks; memory may still grow in so few steps, which the exit code says."""
    command = [sys.executable, "scripts/soak.py", "--ranks", "2", "--steps", "16", "--checkpoint-every", "5"]
    command += ["rollouts.prompts_per_step=2", "rollouts.samples_per_prompt=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1) and "16/16" in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert any(line.startswith(f"| {rank} | memory, MiB | ") for line in lines), done.stdout
    names = {line.split(" | ")[0].removeprefix("| ") for line in lines}
    assert {"metrics.jsonl", "tokens.jsonl", "tensorboard", "checkpoints", "all"} <= names
    assert ("has grown" in done.stderr or "become more" in done.stderr) == bool(done.returncode)
