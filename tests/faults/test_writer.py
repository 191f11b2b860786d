"""A process that writes a checkpoint beside the next steps and dies: an error on every rank; never a hang."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_support.errors import CheckpointError
from tests.faults import runs
from tests.faults.runs import LAYOUTS, STEPS, names, only_run
from tests.ranks import run_ranks

BESIDE = [*LAYOUTS["TP2"], "checkpoint.async_save=true"]
ENDS = {"SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL), "3": lambda: sys.exit(3)}


class InTheSecondSave:
    """Calls a function where a process has written a file of the second checkpoint, and not told of it."""

    def __init__(self, then) -> None:
        self.then, self.saves = then, 0
        self.write = FileSystemWriterAsync.write_preloaded_data

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase == "checkpoint":
            self.saves += 1
            FileSystemWriterAsync.write_preloaded_data = staticmethod(
                self.write_then if self.saves == 2 else self.write
            )

    def write_then(self, *args, **kwargs):
        result = self.write(*args, **kwargs)
        self.then()
        return result


@pytest.mark.parametrize("end", ENDS)
def test_a_writer_that_dies_is_an_error_on_every_rank_and_leaves_the_last_checkpoint(end, tmp_path):
    def on_rank(rank, world):
        with pytest.raises(CheckpointError) as found:
            runs.run(rank, world, tmp_path, BESIDE, InTheSecondSave(ENDS[end]) if rank == 1 else None)
        return str(found.value)

    first, second = run_ranks(2, on_rank, timeout=60)
    assert first == second
    assert (
        f"step_4: the checkpoint cannot be written (the writer process must end with exit code 0, got {end}); free "
        "memory of the host, or set checkpoint.async_save=false"
    ) in first
    assert names(only_run(tmp_path)) == ["latest", "step_2"], "no half of another"
    text, _ = run_ranks(2, runs.run, tmp_path, BESIDE)
    assert "goes on after step 2" in text
    assert names(only_run(tmp_path)) == ["latest", f"step_{STEPS - 2}", f"step_{STEPS}"]


def test_or_the_run_goes_on_without_that_checkpoint(tmp_path):
    def on_rank(rank, world):
        kill = InTheSecondSave(ENDS["SIGKILL"]) if rank == 1 else None
        return runs.run(rank, world, tmp_path, [*BESIDE, "checkpoint.on_write_error=continue"], kill)

    text, _ = run_ranks(2, on_rank, timeout=60)
    (warning,) = [line for line in text.splitlines() if line.startswith("warning: ")]
    assert "step_4: the checkpoint cannot be written (the writer process" in warning
    assert names(only_run(tmp_path)) == ["latest", "step_2", f"step_{STEPS}"]


def test_a_checkpoint_written_at_once_needs_no_process_that_could_die(tmp_path):
    def on_rank(rank, world):
        writers: list[int] = []
        runs.run(rank, world, tmp_path, LAYOUTS["TP2"], InTheSecondSave(lambda: writers.append(os.getpid())))
        return set(writers) == {os.getpid()}

    assert run_ranks(2, on_rank, timeout=60) == [True, True]
