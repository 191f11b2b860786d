"""The loop in the README runs as it is printed there."""

import ast
import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_support.rollouts import write_rollouts
from tests.megatron.actor_setup import VOCAB, make_rollouts
from tests.ranks import run_ranks

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def _loop() -> str:
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "ActorStep(" in code)
    return block


def _run(rank, world, folder):
    code = (
        _loop()
        .replace('"my-model"', repr(str(folder / "model")))
        .replace('running_host("auto")', 'running_host("cpu")')
    )
    printed: list = []
    exec(code, {"my_batches": [folder / "rollouts.jsonl"] * 2, "print": printed.append})
    return printed


def test_it_runs_on_two_ranks(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts())
    first, second = run_ranks(2, _run, tmp_path)
    assert first == second or all(
        a[k] == b[k] for a, b in zip(first, second, strict=True) for k in a if not k.startswith("seconds/")
    )
    assert len(first) == 2 and first[0]["policy_support_excluded_tokens"] > 0 and first[1]["grad_norm"] > 0


def test_it_is_short():
    imports = (ast.Import, ast.ImportFrom)
    statements = [n for n in ast.walk(ast.parse(_loop())) if isinstance(n, ast.stmt) and not isinstance(n, imports)]
    assert len(statements) <= 15
