"""What is told of a writer process that died."""

import queue
from types import SimpleNamespace

import pytest

from megatron_support.megatron.writer_process import tell_of_death


@pytest.mark.parametrize(("code", "told"), [(-9, "SIGKILL"), (-40, "signal 40"), (3, "3")])
def test_the_end_of_a_writer_takes_the_place_of_its_results(code, told):
    results: queue.Queue = queue.Queue()
    results.put("of a process that died afterwards")
    tell_of_death([SimpleNamespace(exitcode=code)], (None, None, results))
    assert str(results.get_nowait()) == f"the writer process must end with exit code 0, got {told}"
    assert results.empty()


def test_nothing_is_told_of_one_that_ended_well():
    results: queue.Queue = queue.Queue()
    tell_of_death([SimpleNamespace(exitcode=0)], (None, None, results))
    assert results.empty()
