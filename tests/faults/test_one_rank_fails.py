"""What one rank alone meets while it trains ends all ranks soon, with one message, through the command line."""

import math
import time
from pathlib import Path

import pytest

import megatron_support.loss.actor as actor
from megatron_support.__main__ import main
from megatron_support.rollouts.files import read_rollouts
from megatron_support.training import sources
from megatron_support.training.sources import make_rollouts
from tests.command_line import command
from tests.faults import runs
from tests.ranks import RanksFailed, run_ranks

LAYOUTS = {"DP2": [], "TP2": ["parallel.tensor=2"], "PP2": ["parallel.pipeline=2"]}
LONGEST = 45.0


def train(folder: Path, overrides: list[str]) -> tuple[int, str]:
    """Exit code and errors of a run of the small recipe."""
    arguments = ["train", "recipe.yaml", f"logging.run_dir={folder / 'runs'}", *overrides]
    code, _, err = command(0, 1, folder, arguments)
    return code, err


def broken(*args, **kwargs):
    raise ZeroDivisionError("in a user's own function")


def train_broken(rank, world, folder, where, overrides):
    """Exit code and output of a rank; on the last one a user's function raises."""
    if rank == world - 1:
        if where == "surrogate":
            actor.surrogate_loss = broken
        else:
            sources.make_rollouts = broken
    return train(folder, overrides)


@pytest.mark.parametrize("where", ["surrogate", "reward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_exception_in_a_users_function_on_one_rank_ends_all(where, layout, tmp_path):
    runs.recipe(tmp_path)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, train_broken, tmp_path, where, LAYOUTS[layout], timeout=120)
    assert time.monotonic() - start < LONGEST
    assert str(caught.value).count("ZeroDivisionError: in a user's own function") == 1, "a traceback where it happened"
    assert "ranks without a result: [1]" in str(caught.value), "the other has ended by itself, quietly"


def train_asleep(rank, world, folder, overrides):
    if rank == world - 1:
        actor.surrogate_loss = lambda *args, **kwargs: time.sleep(600)
    return train(folder, overrides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_hangs_ends_all_after_the_timeout(layout, tmp_path):
    """Its peer waits in one of Megatron's own groups, and times out there; the sleeper is ended by its watcher."""
    runs.recipe(tmp_path)
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"exit codes \[1, (70|-9)\]"):
        run_ranks(2, train_asleep, tmp_path, [*LAYOUTS[layout], "timeout_minutes=0.1"], timeout=120)
    assert time.monotonic() - start < LONGEST


def with_nan(*args, step, **kwargs):
    """Rollouts whose engine reports NaN for one response token of the third step."""
    rollouts = make_rollouts(*args, step=step, **kwargs)
    generation = rollouts.generation_logprobs.clone()
    if step == 2:
        generation[int(rollouts.response_mask.nonzero()[1])] = math.nan
    return rollouts.with_columns(generation_logprobs=generation)


def train_with_nan(rank, world, folder, overrides):
    sources.make_rollouts = with_nan
    return train(folder, overrides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_is_named_with_its_step_and_its_samples_are_kept_for_replay(layout, tmp_path, capsys):
    runs.recipe(tmp_path)
    results = run_ranks(2, train_with_nan, tmp_path, LAYOUTS[layout], timeout=120)
    assert [code for code, _ in results] == [2, 2]
    (message,) = [err for _, err in results if err]
    assert message.startswith("error: step 3: generation_logprobs of sample '2-0-0', token ") and "is nan" in message
    (run,) = (tmp_path / "runs").iterdir()
    (kept,) = run.glob("fault_step_*.jsonl")
    assert f"look at them with: megatron-support replay {kept}" in message
    assert read_rollouts(kept, keep_faults=True).sample_ids == ("2-0-0",)
    assert main(["replay", str(kept), "--recipe", str(run / "recipe.yaml")]) == 2
    again = capsys.readouterr().err
    assert "generation_logprobs of sample '2-0-0', token " in again and "is nan" in again


def train_with_nan_on_the_first(rank, world, folder, overrides):
    if rank == 0:
        sources.make_rollouts = with_nan
    return train(folder, overrides)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_c24_a_nan_that_one_rank_alone_holds_is_the_same_error_on_both(layout, tmp_path):
    runs.recipe(tmp_path)
    start = time.monotonic()
    results = run_ranks(2, train_with_nan_on_the_first, tmp_path, LAYOUTS[layout], timeout=120)
    assert time.monotonic() - start < LONGEST
    assert [code for code, _ in results] == [2, 2]
    (message,) = [err for _, err in results if err]
    assert "generation_logprobs of sample '2-0-0', token " in message and "is nan" in message


def train_with_other_rewards(rank, world, folder):
    """A reward that is not a function of the response alone."""

    def noisy(*args, **kwargs):
        rollouts = make_rollouts(*args, **kwargs)
        return rollouts.with_columns(rewards=rollouts.rewards + rank)

    sources.make_rollouts = noisy
    return train(folder, [])


def test_ranks_with_other_rollouts_are_found_out(tmp_path):
    runs.recipe(tmp_path)
    results = run_ranks(2, train_with_other_rewards, tmp_path, timeout=120)
    assert [code for code, _ in results] == [2, 2]
    (message,) = [err for _, err in results if err]
    assert "every rank must be given the same rollouts, got others in rewards on some" in message


@pytest.mark.parametrize("on_fault", ["skip_sample", "skip_step"])
def test_a_run_may_go_on_without_it(on_fault, tmp_path):
    runs.recipe(tmp_path)
    results = run_ranks(2, train_with_nan, tmp_path, [f"train.on_fault={on_fault}"], timeout=120)
    assert [code for code, _ in results] == [0, 0], results
    steps = runs.metrics(runs.only_run(tmp_path))
    assert [step["faulty_samples"] for step in steps] == [0, 0, 1, 0, 0, 0]
    assert [step["skipped_steps"] for step in steps] == [0, 0, int(on_fault == "skip_step"), 0, 0, 0]
