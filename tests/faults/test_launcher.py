"""The command itself, with the ranks it starts: a signal to the launcher ends the run with everything saved, and 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.faults.runs import RECIPE, names, only_run

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
