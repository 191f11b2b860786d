"""A disk that is full or cannot be written: an error on every rank, or a run that goes on and says so; never a hang."""

from __future__ import annotations

import re
import resource
import shutil
from errno import EFBIG, ENOSPC
from types import SimpleNamespace

import pytest
import torch

from megatron_support.errors import CheckpointError
from megatron_support.megatron import checkpoint_writer, writer_process
from tests.faults import runs
from tests.faults.runs import LAYOUTS, assert_same, metrics, names, only_run
from tests.ranks import run_ranks

FULL = OSError(ENOSPC, "No space left on device")
CANNOT_BE_WRITTEN = r"step_4: the checkpoint cannot be written \(File too large\)"


class LimitFiles:
    """The operating system refuses files above 8 KiB during the n-th save: the parts of a checkpoint, not metrics."""

    def __init__(self, save: int) -> None:
        self.left = save

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase == "checkpoint":
            self.left -= 1
        limit = 8192 if self.left == 0 and phase == "checkpoint" else resource.RLIM_INFINITY
        if phase in ("checkpoint", "sampling"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def expect_end(rank, world, folder, overrides, on_phase=None):
    """The message of the error that ends the run on this rank."""
    with pytest.raises(CheckpointError) as found:
        runs.run(rank, world, folder, overrides, on_phase)
    return str(found.value)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside"])
def test_a_failed_write_ends_the_run_on_every_rank_and_leaves_the_last_checkpoint(asynchronous, tmp_path):
    overrides = [*LAYOUTS["TP2"], f"checkpoint.async_save={str(asynchronous).lower()}"]
    first, second = run_ranks(2, expect_end, tmp_path, overrides, LimitFiles(2))
    assert first == second
    assert re.search(CANNOT_BE_WRITTEN + "; free space on the disk", first)
    assert names(only_run(tmp_path)) == ["latest", "step_2"]
    assert (only_run(tmp_path) / "checkpoints" / "latest").read_text() == "step_2\n"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside"])
def test_or_the_run_goes_on_and_says_so(asynchronous, tmp_path):
    overrides = [f"checkpoint.async_save={str(asynchronous).lower()}", "checkpoint.on_write_error=continue"]
    text = run_ranks(2, runs.run, tmp_path / "full", overrides, LimitFiles(2))[0]
    (warning,) = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert re.search(CANNOT_BE_WRITTEN, warning)
    assert warning.endswith("; the run goes on")
    assert names(only_run(tmp_path / "full")) == ["latest", "step_2", "step_6"]
    run_ranks(2, runs.run, tmp_path / "free", [])
    assert_same(only_run(tmp_path / "full"), only_run(tmp_path / "free"))


def test_it_is_named_whatever_torch_raises_after_it(tmp_path):
    """A large tensor is not buffered, and torch's zip writer finds itself at another place than it should be."""

    def on_rank(rank, world):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        with pytest.raises((OSError, RuntimeError)) as found, (tmp_path / "large").open("wb") as file:
            torch.save(torch.zeros(20_000), file)
        return writer_process._cause(found.value).errno

    assert run_ranks(1, on_rank) == [EFBIG]


@pytest.mark.parametrize("module, owner, name", checkpoint_writer._FIRST_RANK_WRITES, ids=lambda value: value)
def test_what_the_first_rank_alone_cannot_write_leaves_nobody_waiting(module, owner, name, tmp_path):
    target = checkpoint_writer._owner(module, owner, name)
    if target is None:
        pytest.skip(f"this Megatron-Core has no {module}.{name}")

    def on_rank(rank, world):
        def full(*args, **kwargs):
            raise FULL

        setattr(target, name, full)  # only the first rank calls it
        return expect_end(rank, world, tmp_path, [])

    first, second = run_ranks(2, on_rank, timeout=120)
    assert first == second and "step_2: the checkpoint cannot be written (No space left on device)" in first
    assert names(only_run(tmp_path)) == []


def test_metrics_that_cannot_be_written_count_too(tmp_path):
    from megatron_support.training.folder import RunFolder

    def on_rank(rank, world, policy, folder):
        write = RunFolder.write_step

        def full_at_step_2(self, step, values):
            if step == 2:
                raise FULL
            write(self, step, values)

        RunFolder.write_step = full_at_step_2
        overrides = [f"checkpoint.on_write_error={policy}", "train.steps=3"]
        return (expect_end if policy == "raise" else runs.run)(rank, world, folder, overrides)

    messages = run_ranks(2, on_rank, "raise", tmp_path / "raise")
    assert messages[0] == messages[1] and "the run folder: cannot be written (No space left on device)" in messages[0]
    text = run_ranks(2, on_rank, "continue", tmp_path / "continue")[0]
    assert "warning: the run folder: cannot be written (No space left on device)" in text
    assert [line["step"] for line in metrics(only_run(tmp_path / "continue"))] == [1, 3]


def test_checkpoints_that_will_not_fit_are_an_error_before_training(tmp_path):
    def on_rank(rank, world, policy):
        shutil.disk_usage = lambda path: SimpleNamespace(free=300_000)  # one fits, three do not
        overrides = [f"checkpoint.on_write_error={policy}", "train.steps=6"]
        return (expect_end if policy == "raise" else runs.run)(rank, world, tmp_path, overrides)

    first, second = run_ranks(2, on_rank, "raise")
    assert first == second and "3 checkpoints of 0.000151 GiB must fit on the disk, free are 0.000279 GiB" in first
    assert not (tmp_path / "runs").exists(), "nothing is written"
    text = run_ranks(1, on_rank, "continue")[0]
    assert "must fit on the disk" in text and "; the run goes on" in text and names(only_run(tmp_path))
