"""The same recipe in the same layout gives the same bits: sampled tokens, metrics, parameters, optimizer state."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults import runs
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "1 rank": (1, []),
    "TP2": (2, ["parallel.tensor=2", "parallel.sequence=true"]),
    "DP2, distributed optimizer": (
        2,
        ["optimizer={lr: 0.02, distributed: true, overlap_grad_reduce: true, overlap_param_gather: true}"],
    ),
    "PP2": (2, ["parallel.pipeline=2"]),
}
STEPS = 2
SHORT = [f"train.steps={STEPS}", "checkpoint.every=2"]


def trained(folder, world, overrides):
    """The run folder of a run of its own processes."""
    run_ranks(world, runs.run, folder, [*SHORT, *overrides])
    return runs.only_run(folder)


def sampled(run_folder) -> list[dict]:
    """The last step's rollouts, row by row, with every log-probability that the step used."""
    return [json.loads(line) for line in (run_folder / "rollouts_last_step.jsonl").read_text().splitlines()]


def assert_equal(one, two):
    """Two run folders say the same, bit by bit."""
    assert runs.metrics(one) == runs.metrics(two) and len(runs.metrics(one)) == STEPS
    assert sampled(one) == sampled(two)
    runs.assert_same(one, two, steps=STEPS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_and_layout_give_the_same_bits(layout, tmp_path):
    world, overrides = LAYOUTS[layout]
    assert_equal(*(trained(tmp_path / name, world, overrides) for name in ("one", "two")))


def test_a_process_of_its_own_with_other_hashes_gives_the_same_bits(tmp_path):
    """Forked ranks share the order of sets and the addresses of their parent; a cold one has neither."""
    forked = trained(tmp_path / "forked", 1, [])
    runs.recipe(tmp_path / "cold")
    command = [sys.executable, "-m", "megatron_support", "train", "recipe.yaml", *SHORT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "4321"}
    folder = tmp_path / "cold"
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal(forked, runs.only_run(folder))


def test_another_seed_gives_others(tmp_path):
    """What is compared above does depend on the seed."""
    one, two = (trained(tmp_path / str(seed), 1, [f"seed={seed}"]) for seed in (0, 1))
    assert runs.metrics(one) != runs.metrics(two) and sampled(one) != sampled(two)
    ours, theirs = (runs.tensors(run_folder / "checkpoints" / f"step_{STEPS}") for run_folder in (one, two))
    changed = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert any("embedding" in name for name in changed), changed
