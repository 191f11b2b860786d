"""The command itself, with ranks of their own: a signal to the launcher, and a kill under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.faults import runs
from tests.faults.runs import RECIPE, assert_same, metrics, names, only_run
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def test_sigterm_to_the_launcher_finishes_the_step_saves_and_ends_with_0(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    arguments = ["train", "recipe.yaml", "--ranks", "2", "train.steps=100000", "checkpoint.every=100000"]
    program = subprocess.Popen(
        [sys.executable, "-m", "megatron_support", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not list(tmp_path.glob("runs/*/metrics.jsonl")):  # the first step is done
            assert program.poll() is None and time.monotonic() < deadline, program.communicate(timeout=10)
            time.sleep(0.1)
        program.send_signal(signal.SIGTERM)
        text, _ = program.communicate(timeout=180)
    finally:
        program.kill()
    assert program.returncode == 0, text
    stopped = json.loads((only_run(tmp_path) / "stopped.json").read_text())
    assert stopped["signal"] == "SIGTERM" and names(only_run(tmp_path)) == ["latest", f"step_{stopped['step']}"]
    assert f"SIGTERM: stopped after step {stopped['step']} of 100000; the same command goes on from there" in text


def test_torchrun_starts_a_killed_rank_again_and_the_end_is_the_same(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    overrides = ["train.steps=10"]
    program = subprocess.Popen(
        [sys.executable, *torchrun, "-m", "megatron_support", "train", "recipe.yaml", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 180
        while not list(tmp_path.glob("runs/*/checkpoints/step_2")):
            assert program.poll() is None and time.monotonic() < deadline, program.communicate(timeout=10)
            time.sleep(0.05)
        ranks = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        text, _ = program.communicate(timeout=180)
    finally:
        program.kill()
    assert program.returncode == 0 and "goes on after step" in text, text
    run_ranks(2, runs.run, tmp_path / "straight", overrides)
    straight = only_run(tmp_path / "straight")
    assert_same(only_run(tmp_path), straight, steps=10)
    assert metrics(only_run(tmp_path)) == metrics(straight)
