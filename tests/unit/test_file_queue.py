"""A queue in a file: order, emptiness, a writer that ends before anybody reads."""

import multiprocessing
import os
import queue

import pytest

from megatron_support.megatron.file_queue import FileQueue


def test_items_come_out_in_order_and_only_once():
    items = FileQueue()
    for round_ in range(3):
        items.put(("first", round_))
        items.put(OSError(28, "No space left on device"))
        assert items.get_nowait() == ("first", round_)
        assert items.get_nowait().errno == 28
        with pytest.raises(queue.Empty):
            items.get_nowait()


def test_a_forked_writer_can_end_before_its_megabytes_are_read():
    items = FileQueue()
    writer = multiprocessing.get_context("fork").Process(target=items.put, args=(b"x" * 3_000_000,))
    writer.start()
    writer.join(30)
    assert writer.exitcode == 0
    assert items.get_nowait() == b"x" * 3_000_000


@pytest.mark.parametrize("left", [3, 20])
def test_what_a_killed_writer_has_cut_off_is_none(left):
    items = FileQueue()
    items.put(b"x" * 1000)
    os.ftruncate(items._file.fileno(), left)
    with pytest.raises(queue.Empty):
        items.get_nowait()
    items.put("next")
    assert items.get_nowait() == "next"
