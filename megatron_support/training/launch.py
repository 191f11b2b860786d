"""``megatron-support train --ranks N``: ``torchrun --standalone``, with our exit code and no traceback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run ``python -m megatron_support ARGUMENTS`` on ranks of this machine that find each other.

    Args:
        arguments: of the command line.
        ranks: how many.

    Returns:
        0, or the exit code of the first rank that failed, or 130 after an interruption.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank has said what was wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"megatron-support-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "megatron_support", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode or 1
    except SignalException:
        return 130
    return 0
