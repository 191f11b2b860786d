"""Every example runs as its first lines say, and prints what it is there to show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from megatron_support.rollouts.files import read_rollouts

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_loop_of_your_own():
    lines = run("own_loop.py")
    assert [line.split(":")[0] for line in lines] == ["step 0", "step 1", "step 2"]
    norms = [float(re.search(r"norm ([\d.]+)", line).group(1)) for line in lines]
    counts = [int(re.search(r"(\d+) tokens excluded", line).group(1)) for line in lines]
    assert min(norms) > 0 and min(counts) > 0 and max(counts) < 64


def test_its_loop_is_short():
    body = (EXAMPLES / "own_loop.py").read_text().split("def main()")[1].split("if __name__")[0]
    assert len(body.strip().splitlines()) <= 45


def test_replaying_a_support_loses_nothing():
    recomputed, replayed, gap = run("replay_support.py")
    assert int(re.search(r": +(\d+) of 2000", recomputed).group(1)) > 10
    assert re.search(r": +0 of 2000", replayed) and 0 < float(re.search(r": +([\d.]+) nats", gap).group(1)) < 0.1


def test_scoring_a_file(tmp_path):
    excluded, gap, written = run("score_file.py", str(tmp_path / "scored.parquet"))
    count = int(re.search(r": (\d+) of 64", excluded).group(1))
    scored = read_rollouts(tmp_path / "scored.parquet")
    assert count == int((scored.prev_logprobs == -torch.inf).sum()) > 0 and written.endswith("scored.parquet")
    assert 0 < float(re.search(r": ([\d.]+) nats", gap).group(1)) < 20
    assert bool(torch.isfinite(scored.prev_logprobs_unfiltered).all())


def test_a_surrogate_of_your_own():
    loss, excluded = run("custom_surrogate.py")
    gradient = eval(loss.split("gradient ")[1])
    assert gradient[0][1] == 0 and gradient[0][0] != 0 and excluded == "excluded tokens: 1"


def test_the_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text()
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(re.findall(r"\| \[(\w+\.py)\]", table))
    for link in re.findall(r"\]\(([^)#]+)\)", table):
        assert (EXAMPLES / link).exists(), link
