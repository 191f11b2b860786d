"""``megatron-support train --ranks N``: ``torchrun --standalone``, with our exit code and no traceback."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(
    arguments: Sequence[str], ranks: int, *, max_restarts: int = 0, ended: Callable[[], bool] = lambda: False
) -> int:
    """Run ``python -m megatron_support ARGUMENTS`` on ranks of this machine that find each other.

    Args:
        arguments: of the command line.
        ranks: how many.
        max_restarts: how often all ranks are started again after one has failed or was killed.
        ended: asked after an interruption, once no rank is left: whether they ended by themselves, with all saved.

    Returns:
        0, or the exit code of the first rank that failed, or 130 after an interruption that the ranks did not survive.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the rank has said what was wrong
    try:
        elastic_launch(launch_config(ranks, max_restarts), sys.executable)("-m", "megatron_support", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode or 1
    except SignalException:
        return 0 if ended() else 130
    return 0


def launch_config(ranks: int, max_restarts: int) -> LaunchConfig:
    """One machine, and a meeting point on a free port."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"megatron-support-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
    )
