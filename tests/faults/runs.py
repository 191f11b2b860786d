"""A small run that samples, saves checkpoints and can be compared bit by bit with another."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from rich.console import Console
from torch import Tensor

from megatron_support.config import Recipe, load_recipe
from megatron_support.megatron.host import setup_host
from megatron_support.training.run import train
from tests.ranks import run_ranks

STEPS = 6

RECIPE = {
    "name": "small",
    "device": "cpu",
    "model": {
        "architecture": {
            "vocab_size": 259,
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "max_sequence_length": 32,
            "tie_embeddings": False,
        },
        "dtype": "float32",
    },
    # a large eps: Adam divides a gradient that is all rounding by itself, which no two layouts could agree on
    "optimizer": {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "schedule": {"type": "cosine", "warmup_steps": 2}},
    "rollouts": {
        "type": "sampler",
        "task": "sort",
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
        "weights_dtype": "float32",
        "sampling": {"top_p": 0.95},
    },
    "loss": {"kl": {"coef": 0.05, "type": "k3"}},
    "train": {
        "steps": STEPS,
        "minibatches": 2,
        "epochs": 2,
        "shuffle": True,
        "microbatch": {"max_tokens": 64},
    },
    "checkpoint": {"every": 2},
    "logging": {"tensorboard": False, "progress": "off"},
}

LAYOUTS = {
    "DP2": ["optimizer.distributed=true"],
    "TP2": ["parallel.tensor=2", "parallel.sequence=true"],
    "PP2": ["parallel.pipeline=2"],
}


def recipe(folder: Path, *overrides: str) -> Recipe:
    """The small recipe with its runs in a folder."""
    path = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".recipe-{os.getpid()}"  # ranks write it at the same time
    part.write_text(yaml.safe_dump(RECIPE))
    part.replace(path)
    return load_recipe(path, [f"logging.run_dir={folder / 'runs'}", *overrides])


def run(rank: int, world: int, folder: Path, overrides: list[str], on_phase: Callable | None = None) -> str:
    """Train on this rank; returns what it printed."""
    out = io.StringIO()
    train(recipe(folder, *overrides), Console(file=out, width=200), on_phase=on_phase)
    return out.getvalue()


def only_run(folder: Path) -> Path:
    """The one run folder there is."""
    (found,) = (folder / "runs").iterdir()
    return found


def names(run_folder: Path) -> list[str]:
    """What is in its folder of checkpoints, hidden names too."""
    return sorted(path.name for path in (run_folder / "checkpoints").iterdir())


def metrics(run_folder: Path) -> list[dict]:
    """What each step wrote, without what the clock and the process say."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("seconds", "tokens_per_second", "memory_gib", "mfu")
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by name: parameters and the optimizer's state."""
    return run_ranks(1, _read, checkpoint)[0]


def _read(rank: int, world: int, checkpoint: Path) -> dict[str, Tensor]:
    from megatron.core import dist_checkpointing

    setup_host("cpu")
    plain = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {name: value for name, value in plain.items() if isinstance(value, Tensor)}


def assert_same(run_folder: Path, other: Path, *, tolerance: float = 0.0, steps: int = STEPS) -> None:
    """Final parameters and optimizer state of two runs are equal: bit by bit, or up to a tolerance."""
    ours, theirs = (tensors(folder / "checkpoints" / f"step_{steps}") for folder in (run_folder, other))
    assert ours.keys() == theirs.keys() and len(ours) > 20
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
