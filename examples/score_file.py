"""Scoring a rollout file: a model's log-probabilities as new columns, and how far it is from the engine that sampled.

python examples/score_file.py [OUT.parquet]                                        (one rank)
torchrun --standalone --nproc-per-node 2 examples/score_file.py                    (data parallel)

``megatron-support score FILE RECIPE --output OUT`` does it for a recipe's model.
"""

import sys
from pathlib import Path

import torch

from megatron_support import megatron as ms
from megatron_support.config.recipe import MicrobatchConfig, ModelConfig, ParallelConfig
from megatron_support.rollouts import read_rollouts, write_rollouts

ROLLOUTS = Path(__file__).parent / "data/swap_values.jsonl"
TINY = {"vocab_size": 259, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}


def main(output: str | None = None) -> None:
    with ms.running_host("auto"):
        groups = ms.initialize_parallel(layout := ParallelConfig())
        config = ModelConfig.from_dict({"architecture": TINY, "dtype": "float32"})  # or weights of your own
        model = ms.build_model(config, layout, groups, seed=1)
        rollouts = read_rollouts(ROLLOUTS, vocab_size=model.vocab_size)
        found = ms.compute_logprobs(model, rollouts, groups=groups, microbatch=MicrobatchConfig(max_tokens=64))
        scored = rollouts.with_columns(prev_logprobs=found.filtered, prev_logprobs_unfiltered=found.unfiltered)
        inside = rollouts.response_mask & (found.filtered > -torch.inf)  # -inf: outside the model's support
        gap = (found.filtered - rollouts.generation_logprobs)[inside].abs().mean()
        if groups.is_main:
            total = int(rollouts.response_mask.sum())
            print(f"outside the support: {total - int(inside.sum())} of {total} response tokens")
            print(f"mean |model - engine| at the others: {gap:.3f} nats")
            if output is not None:
                write_rollouts(output, scored)
                print(f"written to {output}")


if __name__ == "__main__":
    main(*sys.argv[1:])
