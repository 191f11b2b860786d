"""A run that is stopped and started again is the run that was not: bit by bit in its layout, by rounding in another."""

import json
import os
import signal

import pytest

from megatron_support.errors import ConfigurationError
from tests.faults import runs
from tests.faults.runs import LAYOUTS, STEPS, assert_same, metrics, names, only_run
from tests.ranks import run_ranks


class SignalAt:
    """Sends a signal to this process when a phase begins for the n-th time."""

    def __init__(self, phase: str, count: int, number: int = signal.SIGTERM, rank: int = 0) -> None:
        self.phase, self.left, self.number, self.rank = phase, count, number, rank

    def __call__(self, name: str, done: int, total: int) -> None:
        if name == self.phase and done == 0:
            self.left -= 1
            if self.left == 0 and int(os.environ["RANK"]) == self.rank:
                os.kill(os.getpid(), self.number)


def stopped(folder, overrides, at, world=2):
    """The run folder of a run that a signal ended, and what it printed."""
    text = run_ranks(world, runs.run, folder, overrides, at)[0]
    return only_run(folder), text


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Layout -> folder of a run that nothing disturbed."""
    made = {}

    def get(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(layout)
            run_ranks(2, runs.run, folder, LAYOUTS[layout])
            made[layout] = only_run(folder)
        return made[layout]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_next_steps_are_the_same_bit_by_bit(layout, straight, tmp_path):
    """The second rank alone gets the signal, in step 3: all finish it and save."""
    overrides = LAYOUTS[layout]
    folder, text = stopped(tmp_path, overrides, SignalAt("previous", 3, rank=1))
    assert names(folder) == ["latest", "step_2", "step_3"]
    assert json.loads((folder / "stopped.json").read_text()) == {"signal": "SIGTERM", "step": 3}
    assert not (folder / "summary.json").exists()
    assert text.endswith(f"SIGTERM: stopped after step 3 of {STEPS}; the same command goes on from there\n")

    text = run_ranks(2, runs.run, tmp_path, overrides)[0]
    assert f"goes on after step 3 of {folder}/checkpoints/step_3" in text.splitlines()
    assert only_run(tmp_path) == folder and names(folder) == ["latest", "step_4", "step_6"]
    assert (folder / "checkpoints" / "latest").read_text() == "step_6\n"
    assert not (folder / "stopped.json").exists()
    assert metrics(folder) == metrics(straight(layout))
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, straight(layout)))
    for summary in (ours, theirs):
        summary["last_step"] = {k: v for k, v in summary["last_step"].items() if not k.startswith("seconds")}
    assert ours == theirs
    assert_same(folder, straight(layout))


@pytest.mark.parametrize(("before", "after", "world"), [("TP2", [], 1), ("PP2", LAYOUTS["TP2"], 2)])
def test_another_layout_goes_on_up_to_rounding(before, after, world, straight, tmp_path):
    folder, _ = stopped(tmp_path, LAYOUTS[before], SignalAt("sampling", 4))
    text = run_ranks(world, runs.run, tmp_path, after)[0]
    assert "goes on after step 4" in text
    # 12 updates of up to 0.02 each, with gradients that differ by fp32 rounding
    assert_same(folder, straight(before), tolerance=1e-6)


def test_sigint_is_a_wish_too_and_a_second_one_changes_nothing(tmp_path):
    first, second = SignalAt("update", 1, signal.SIGINT), SignalAt("checkpoint", 1, signal.SIGINT)

    def both(*phase):
        first(*phase)
        second(*phase)

    folder, text = stopped(tmp_path, [], both, world=1)
    assert names(folder) == ["latest", "step_1"] and "SIGINT: stopped after step 1" in text


def test_without_checkpoints_a_signal_ends_the_run_at_once(tmp_path):
    def on_rank(rank, world):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            runs.run(rank, world, tmp_path, ["checkpoint.every=null"], SignalAt("sampling", 2, signal.SIGINT))
        return [line["step"] for line in metrics(only_run(tmp_path))]

    assert run_ranks(1, on_rank) == [[1]]


def test_what_a_kill_left_half_written_is_never_picked_up_and_goes(tmp_path):
    folder, _ = stopped(tmp_path, [], SignalAt("update", 2), world=1)
    half = folder / "checkpoints" / ".step_5.0123abcd.tmp"
    half.mkdir()
    (half / "common.pt").write_bytes(b"half")
    (folder / "checkpoints" / "step_9").mkdir()  # by another program: without metadata.json no checkpoint
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 0.5}\n{"step": 4, "rew')  # of steps that no checkpoint holds
    text = run_ranks(1, runs.run, tmp_path, ["checkpoint.keep_last=1"])[0]
    assert "goes on after step 2" in text
    assert names(folder) == ["latest", "step_6", "step_9"]
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert all("loss" in line for line in metrics(folder))


def test_auto_takes_the_same_recipe_alone(tmp_path):
    folder, _ = stopped(tmp_path, [], SignalAt("update", 2), world=1)
    short = ["train.steps=6", "optimizer.lr=0.01"]
    assert "goes on" not in run_ranks(1, runs.run, tmp_path, short)[0]
    assert "goes on" not in run_ranks(1, runs.run, tmp_path, ["checkpoint.resume=never"])[0]
    assert "goes on after step 2" in run_ranks(1, runs.run, tmp_path, [])[0]
    assert "goes on" not in run_ranks(1, runs.run, tmp_path, [])[0], "it has ended"
    assert len(list((tmp_path / "runs").iterdir())) == 4 and folder.exists()


def test_a_run_that_goes_on_elsewhere_is_left_alone(tmp_path):
    """While one process writes a run, another with the same recipe starts its own."""
    from megatron_support.training.run_lock import lock_file

    folder, _ = stopped(tmp_path, [], SignalAt("update", 2), world=1)
    held = lock_file(folder / "recipe.yaml")

    def refused(rank, world):
        with pytest.raises(ConfigurationError, match="must be a run that has ended"):
            runs.run(rank, world, tmp_path, [f"checkpoint.resume={folder}"])

    run_ranks(1, refused)
    assert "goes on" not in run_ranks(1, runs.run, tmp_path, [])[0]
    held.close()


def test_a_path_is_a_run_or_a_checkpoint_of_one(tmp_path):
    folder, _ = stopped(tmp_path, ["checkpoint.keep_last=null"], SignalAt("update", 5), world=1)
    assert names(folder) == ["latest", "step_2", "step_4", "step_5"]
    changed = [f"checkpoint.resume={folder / 'checkpoints' / 'step_2'}", "timeout_minutes=7", "logging.progress=off"]
    text = run_ranks(1, runs.run, tmp_path, changed)[0]
    (line,) = [line for line in text.splitlines() if line.endswith(" in this recipe")]
    assert line.startswith("timeout_minutes: ") and line.endswith(" in the checkpoint, 7.0 in this recipe")
    assert "the learning rate" not in text
    assert "goes on after step 2" in text
    branch = next(path for path in (tmp_path / "runs").iterdir() if path != folder)
    assert [line["step"] for line in metrics(branch)] == [3, 4, 5, 6]
    assert json.loads((branch / "summary.json").read_text())["steps"] == 6
    run_ranks(1, runs.run, tmp_path, [f"checkpoint.resume={folder}"])
    assert (folder / "summary.json").exists()
    assert_same(branch, folder)

    def refused(rank, world):
        with pytest.raises(ConfigurationError, match=r"checkpoint\.resume must be auto, never, a run folder"):
            runs.run(rank, world, tmp_path, [f"checkpoint.resume={tmp_path}"])

    run_ranks(2, refused)


def test_a_checkpoint_written_meanwhile_is_the_one_written_at_once(straight, tmp_path):
    run_ranks(2, runs.run, tmp_path, [*LAYOUTS["TP2"], "checkpoint.async_save=true", "checkpoint.every=1"])
    assert names(only_run(tmp_path)) == ["latest", "step_5", "step_6"]
    assert_same(only_run(tmp_path), straight("TP2"))


def test_a_resumed_run_says_what_its_recipe_has_changed(straight, tmp_path):
    """The first rank alone, one line a field; what is logged and kept is none."""
    folder, _ = stopped(tmp_path, LAYOUTS["TP2"], SignalAt("update", 5))
    changed = ["seed=7", "optimizer.lr=0.01", "optimizer.schedule={type: constant}", "train.steps=7"]
    elsewhere = [f"checkpoint.resume={folder}", "logging.tokens=false", "checkpoint.keep_last=1"]
    texts = run_ranks(2, runs.run, tmp_path, [*LAYOUTS["TP2"], *changed, *elsewhere])
    lines = texts[0].splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("goes on after step "))
    told = [line for line in lines[begin + 1 :] if line.endswith(" in this recipe")]
    assert told == lines[begin + 1 : begin + 1 + len(told)]
    assert set(told) == {
        "seed: 1234 in the checkpoint, 7 in this recipe",
        "optimizer.lr: 0.02 in the checkpoint, 0.01 in this recipe",
        'optimizer.schedule.type: "cosine" in the checkpoint, "constant" in this recipe',
        "train.steps: 6 in the checkpoint, 7 in this recipe",
        "optimizer.schedule.warmup_steps: 2 in the checkpoint, 0 in this recipe",
    }
    assert lines[begin + 1 + len(told)].startswith("the learning rate goes on by the checkpoint's schedule")
    assert len(told) == len(set(told)) and " in this recipe" not in texts[1]
    again = run_ranks(2, runs.run, tmp_path, [*LAYOUTS["TP2"], *changed, *elsewhere[:1]])[0]
    rates = [line["lr"] for line in metrics(straight("TP2"))]
    assert [line["lr"] for line in metrics(folder)] == [*rates, 0.0], "by the checkpoint's cosine, which ends at step 6"
    assert "goes on after step 7" in again and " in this recipe" not in again
