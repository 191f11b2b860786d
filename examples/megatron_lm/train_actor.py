"""Megatron-LM's ``pretrain`` over a file of rollouts, with our forward step. See README.md beside this file.

torchrun --nproc-per-node 1 examples/megatron_lm/train_actor.py --rollouts examples/data/swap_values.jsonl ...
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch.nn.functional import pad

from megatron_support import grpo_advantages
from megatron_support.adapters.megatron_lm import forward_step
from megatron_support.rollouts import read_rollouts


class Rollouts(torch.utils.data.Dataset):
    """A file's sequences, over and over, each in the columns that the forward step reads."""

    def __init__(self, path: str, *, width: int, size: int) -> None:
        self.rollouts, self.width, self.size = read_rollouts(path), width, size
        longest = int(self.rollouts.lengths.max())
        if longest > width:
            raise SystemExit(f"--seq-length must be at least {longest}, got {width}")
        self.advantages = grpo_advantages(self.rollouts.rewards, self.rollouts.group_ids)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        sequence = index % self.rollouts.num_sequences
        start, end = self.rollouts.cu_seqlens[sequence : sequence + 2].tolist()
        fill = (0, self.width - (end - start))
        generation = pad(self.rollouts.generation_logprobs[start:end], fill)[1:]
        return {
            "tokens": pad(self.rollouts.tokens[start:end], fill),
            "position_ids": torch.arange(self.width),
            "loss_mask": pad(self.rollouts.response_mask[start:end].float(), fill),
            "advantages": self.advantages[sequence],
            "old_logprobs": generation,  # one update per rollout: the engine's are those of the policy before it
            "inference_logprobs": generation,
        }


def datasets(train_valid_test_samples: Any) -> tuple[Rollouts, None, None]:
    args = get_args()
    return Rollouts(args.rollouts, width=args.seq_length, size=args.train_iters * args.global_batch_size), None, None


datasets.is_distributed = True  # every tensor-parallel rank reads the file


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--rollouts", required=True, help="JSONL or Parquet file, see examples/data/README.md")
    return parser


def main() -> None:
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
