"""The Megatron-LM example: with the command line of its page, and pretrain's part up to the loop replaced off a GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.adapters import megatron_lm_setup as setup
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(setup.MISSING), reason=setup.MISSING)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/megatron_lm"
OFF_A_GPU = ["--distributed-backend", "gloo", "--use-cpu-initialization", "--no-masked-softmax-fusion", "--lr", "1e-2"]


def command() -> list[str]:
    """The words of the page's command."""
    block = re.search(r"```bash\n(torchrun .*?)```", (FOLDER / "README.md").read_text(), re.S)
    return shlex.split(block.group(1).replace("\\\n", ""))


def _example(rank, world, words):
    from megatron.training import get_args, training

    specification = importlib.util.spec_from_file_location("train_actor", FOLDER / "train_actor.py")
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    found = []

    def pretrain(container, datasets, model_type, forward_step):
        args = get_args()
        setup.initialize(args)
        model, optimizer, scheduler, config = setup.build(args, container)
        iterator, *_ = training.build_train_valid_test_data_iterators(datasets)
        for _ in range(2):
            (metrics, skipped, *_), _ = setup.train(model, optimizer, scheduler, config, forward_step, iterator)
            found.append(({name: float(value) for name, value in metrics.items()}, skipped))

    setup.setup_host("cpu")
    with mock.patch.object(example, "pretrain", pretrain), setup.on_command_line(words):
        example.main()
    return found


@pytest.mark.parametrize("world", [1, 2], ids=["one_rank", "dp2"])
def test_its_page_s_command_trains_on_its_rollouts(world, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = command()
    script = words.index("examples/megatron_lm/train_actor.py")
    results = run_ranks(world, _example, [*words[script + 1 :], *OFF_A_GPU])
    (first, _), (second, _) = steps = results[0]
    assert not any(skipped for _, skipped in steps)
    assert first["num_valid_samples"] == second["num_valid_samples"] == 16
    assert first["policy_support_excluded_tokens"] > 0
    assert first["lm loss"] != second["lm loss"]
    for one, other in zip(results[0], results[-1], strict=True):  # every rank logs the whole step
        assert one[0] == pytest.approx(other[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pretrain asserts CUDA")
def test_pretrain_runs_it_on_a_gpu():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    words = [sys.executable, "-m", "torch.distributed.run", *command()[1:]]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "policy_support_excluded_tokens" in done.stdout
