"""A queue between a process and those forked from it that needs no process, thread or pipe of its own."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from typing import Any


class FileQueue:
    """First in, first out; kept in a file without a name, which goes with the last process that has it open.

    Unlike a pipe it never fills up, so a writer that has put its result can end before anybody reads it. One process
    puts at a time, and only the one that made the queue gets.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the queue)
        self._read = 0

    def put(self, item: Any) -> None:
        data = pickle.dumps(item)
        descriptor = self._file.fileno()
        end = os.fstat(descriptor).st_size
        record = len(data).to_bytes(8, "big") + data
        while record:
            written = os.pwrite(descriptor, record, end)
            record, end = record[written:], end + written

    def get_nowait(self) -> Any:
        """The oldest item that was not taken yet. One that is cut off, as its writer was killed, is none.

        Raises:
            queue.Empty: there is none.
        """
        descriptor = self._file.fileno()
        if os.fstat(descriptor).st_size <= self._read:
            raise queue.Empty
        header = os.pread(descriptor, 8, self._read)
        length = int.from_bytes(header, "big")
        data = os.pread(descriptor, length, self._read + 8)
        self._read += 8 + length
        if os.fstat(descriptor).st_size <= self._read:  # keep the file small
            os.ftruncate(descriptor, 0)
            self._read = 0
        if len(header) + len(data) < 8 + length:
            raise queue.Empty
        return pickle.loads(data)
