"""Each laptop recipe takes a step on one rank and does what it is there for."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_support.config import load_recipe
from megatron_support.rollouts.files import read_rollouts
from megatron_support.training.run import train
from tests.ranks import run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = ["train.steps=1", "parallel.tensor=1", "logging.tensorboard=false", "logging.progress=off"]
SAMPLED = ["rollouts.prompts_per_step=8"]


def run(rank, world, name, folder, overrides):
    recipe = load_recipe(CONFIGS / f"{name}.yaml", [*SMALL, f"logging.run_dir={folder}", *overrides])
    return str(train(recipe, Console(file=io.StringIO())).folder)


def step(name, folder, *overrides) -> tuple[dict, Path]:
    path = Path(run_ranks(1, run, name, folder, overrides)[0])
    return json.loads((path / "metrics.jsonl").read_text().splitlines()[0]), path


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "reinforce_pp", "replay"])
def test_a_step_learns_something(name, tmp_path):
    values, folder = step(name, tmp_path, *SAMPLED)
    assert values["grad_norm"] > 0 and values["skipped_updates"] == 0
    assert ("kl_penalty" in values) == (name in ("grpo", "replay"))
    assert ("seconds/reference" in values) and (values["policy_support_excluded_tokens"] > 0) == (name != "replay")
    rollouts = read_rollouts(folder / "rollouts_last_step.jsonl")
    assert (rollouts.reference_logprobs is not None) == (name in ("grpo", "reinforce_pp", "replay"))


def test_given_values_are_learned_from(tmp_path):
    values, folder = step("ppo_gae", tmp_path)
    rollouts = read_rollouts(folder / "rollouts_last_step.jsonl")
    assert rollouts.values is not None and values["grad_norm"] > 0
    advantages = rollouts.advantages[rollouts.response_mask]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-5), "whitened"


def test_a_teacher_checkpoint_gives_the_advantages(tmp_path, monkeypatch):
    _, taught = step("quickstart", tmp_path, *SAMPLED, "train.save_final=true", "optimizer.lr=0.02")
    monkeypatch.setenv("TEACHER", str(taught / "checkpoint"))
    values, folder = step("opd", tmp_path, *SAMPLED)
    rollouts = read_rollouts(folder / "rollouts_last_step.jsonl")
    inside = rollouts.response_mask & rollouts.prev_logprobs.isfinite()
    gap = rollouts.teacher_logprobs - rollouts.prev_logprobs_unfiltered
    assert gap[inside].abs().max() > 0.01 and values["grad_norm"] > 0 and values["seconds/teacher"] > 0
    assert rollouts.advantages[inside].tolist() == pytest.approx(gap[inside].tolist(), abs=1e-5)
    same, _ = step("opd", tmp_path, *SAMPLED, "teacher.checkpoint={type: random}")
    assert same["grad_norm"] == pytest.approx(0, abs=1e-6), "its own teacher: nothing to learn"
