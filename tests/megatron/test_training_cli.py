"""The command line on two ranks with input that only the machine, the model or a file shows to be wrong.

Each case: every rank ends with exit code 2, one of them prints one message, nothing is written.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_support.errors import RolloutError
from megatron_support.rollouts.readers import read_dump
from megatron_support.training import checks
from tests.command_line import command
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]

# a prompt of two tokens and a response of three, sampled under top-k 8
ROW = {
    "id": "0-0",
    "prompt_id": 0,
    "prompt": "ab",
    "response": "cde",
    "tokens": [97, 98, 99, 100, 101],
    "response_mask": [0, 0, 1, 1, 1],
    "generation_logprobs": [0.0, 0.0, -1.0, -1.0, -1.0],
    "reward": 1.0,
    "sampling": {"temperature": 1.0, "top_k": 8, "top_p": 1.0},
    "support": None,
}

RECIPE = {
    "name": "run",
    "device": "cpu",
    "model": {
        "architecture": {
            "vocab_size": 259,
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
            "max_sequence_length": 32,
        },
        "dtype": "float32",
    },
    "parallel": {"tensor": 2},
    "optimizer": {"lr": 0.1},
    "rollouts": {"type": "files", "paths": ["rollouts.jsonl"], "sequences_per_step": 2},
    "train": {"steps": 1, "microbatch": {"max_tokens": 64}},
}


def row(**changes) -> str:
    return json.dumps({**ROW, **changes})


def without(field: str) -> str:
    return json.dumps({name: value for name, value in ROW.items() if name != field})


def expect_refusal(folder: Path, arguments: list[str], parts: list[str], world: int = 2) -> None:
    before = sorted(folder.iterdir())
    results = run_ranks(world, command, folder, arguments, timeout=60)
    assert [code for code, _, _ in results] == [2] * world, results
    assert [out for _, out, _ in results] == [""] * world
    messages = [err for _, _, err in results if err]
    assert len(messages) == 1 and messages[0].startswith("error: ") and "Traceback" not in messages[0], results
    for part in parts:
        assert part in messages[0], messages[0]
    assert sorted(folder.iterdir()) == before, "nothing is written"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "rollouts.jsonl").write_text("\n".join([row(), row(id="0-1"), row(id="0-2")]) + "\n")
    (tmp_path / "folder.jsonl").mkdir()
    return tmp_path


# what the third line of the file is, and parts of the message besides the file and the line
BAD_ROWS = {
    "not JSON": ("{", []),
    "not an object": ("[1]", []),
    "missing field": (without("tokens"), ["tokens"]),
    "wrong lengths": (row(response_mask=[0, 0, 1, 1]), ["response_mask", "4", "5"]),
    "token outside the vocabulary": (row(tokens=[97, 98, 99, 100, 259]), ["tokens", "259"]),
    "negative token": (row(tokens=[97, 98, 99, 100, -1]), ["tokens", "-1"]),
    "no response token": (row(response_mask=[0, 0, 0, 0, 0]), ["response_mask"]),
    "missing generation log-probability": (
        row(generation_logprobs=[0.0, 0.0, -1.0, None, -1.0]),
        ["generation_logprobs"],
    ),
    "no generation log-probabilities": (without("generation_logprobs"), ["generation_logprobs: required and missing"]),
    "generation log-probability NaN": (
        row(generation_logprobs=[0.0, 0.0, -1.0, float("nan"), -1.0]),
        ["generation_logprobs"],
    ),
    "generation log-probability above 0": (
        row(generation_logprobs=[0.0, 0.0, -1.0, 0.5, -1.0]),
        ["generation_logprobs", "0.5"],
    ),
    "too few generation log-probabilities": (row(generation_logprobs=[0.0, 0.0, -1.0]), ["generation_logprobs", "3"]),
    "no sampling parameters": (without("sampling"), ["sampling"]),
    "top_p out of range": (row(sampling={"temperature": 1.0, "top_k": 8, "top_p": 1.5}), ["top_p", "1.5"]),
    "reward missing": (without("reward"), ["reward"]),
    "support without the sampled token": (
        row(support={"token_ids": [1, 2, 3], "offsets": [0, 0, 0, 1, 2, 3]}),
        ["support"],
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(case, folder):
    line, parts = BAD_ROWS[case]
    (folder / "rollouts.jsonl").write_text("\n".join([row(), row(id="0-1"), line]) + "\n")
    expect_refusal(folder, ["train", "recipe.yaml"], ["rollouts.jsonl:3: ", *parts])


def test_what_one_rank_alone_finds_ends_all(folder):
    """A file that is damaged on one machine: all ranks end, and one of them shows the message."""

    def run(rank, world):
        def read(path, **options):
            if rank == 1:
                raise RolloutError(f"{path}:2: reward: required and missing; add it")
            return read_dump(path, **options)

        checks.read_dump = read  # in this forked rank alone
        return command(rank, world, folder, ["train", "recipe.yaml"])

    results = run_ranks(2, run, timeout=60)
    assert [code for code, _, _ in results] == [2, 2]
    (message,) = [err for _, _, err in results if err]
    assert message.endswith("rollouts.jsonl:2: reward: required and missing; add it\n")


@pytest.mark.parametrize("masked", [[True, False], [True, True]], ids=["one rank's sequences", "all"])
def test_c13_masked_sequences_train_nothing_and_are_no_error(masked, folder):
    """Data parallel: a step whose sequences are all masked on one rank, or on both."""
    unfiltered = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
    rows = [row(id=f"{i}", reward=1.0, sample_mask=not gone, sampling=unfiltered) for i, gone in enumerate(masked)]
    (folder / "rollouts.jsonl").write_text("\n".join(rows) + "\n")
    arguments = ["train", "recipe.yaml", "parallel.tensor=1", "advantages={type: reinforce_pp, whiten: false}"]
    results = run_ranks(2, command, folder, arguments, timeout=60)
    assert [code for code, _, _ in results] == [0, 0], results
    (run,) = (folder / "runs").iterdir()
    metrics = json.loads((run / "metrics.jsonl").read_text())
    assert metrics["valid_tokens"] == 3 * masked.count(False)
    assert metrics["skipped_updates"] == int(all(masked))
    assert (metrics["loss"] == 0) == all(masked)


# overrides of the recipe, parts of the message
BAD_RECIPES = {
    "no such file": (["rollouts.paths=[gone.jsonl]"], ["gone.jsonl"]),
    "unreadable file": (["rollouts.paths=[folder.jsonl]"], ["folder.jsonl: cannot read it"]),
    "more rows than there are": (
        ["rollouts.sequences_per_step=4"],
        ["sequences_per_step must be <= the 3 rows", "got 4", "lower it"],
    ),
    "too many tokens for a microbatch": (
        ["train.microbatch.max_tokens=4"],
        ["max_tokens=4", "0-0 (5 tokens)", "raise train.microbatch.max_tokens"],
    ),
    "too many tokens for the model": (
        ["model.architecture.max_sequence_length=4"],
        ["max_sequence_length = 4", "got 5"],
    ),
    "world not divisible": (
        ["parallel.pipeline=2"],
        ["2 x 2 x 1 = 4 must divide the number of ranks, got 2", "torchrun --nproc-per-node 4"],
    ),
    "TP does not divide the heads": (
        ["model.architecture.num_attention_heads=1"],
        ["parallel.tensor must divide", "num_attention_heads 1", "got 2"],
    ),
    "PP does not divide the layers": (
        ["parallel.tensor=1", "parallel.pipeline=2", "model.architecture.num_layers=3"],
        ["parallel.pipeline must divide", "num_layers 3", "got 2"],
    ),
    "no such weights": (
        ["model.architecture=null", "model.weights={type: gguf, path: gone.gguf}"],
        ["model.weights.path must be a GGUF file", "gone.gguf"],
    ),
    "no such checkpoint": (["model.weights={type: megatron, path: gone}"], ["gone", "metadata.json"]),
    "schedule of warmup alone": (
        ["optimizer.schedule={type: cosine, warmup_steps: 9}"],
        ["optimizer.schedule.warmup_steps must be below", "got 9"],
    ),
    "nothing to replay": (
        ["logprobs.support=replay"],
        ["logprobs.support replay needs rollouts with the sampler's kept sets"],
    ),
    "no values for GAE": (
        ["advantages={type: gae}"],
        ["must carry the columns ['values'] for gae advantages", "add them to the files"],
    ),
    "no values in a sampler's rollouts": (
        [
            "advantages={type: gae}",
            "rollouts={type: sampler, task: sort, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}",
        ],
        ["['values'] for gae advantages", "take rollouts from files that have them"],
    ),
    "no GPU": (["device=cuda"], ["device must be auto or cpu", "got 'cuda'"]),
    "run_dir in a file": (
        ["logging.run_dir=recipe.yaml/runs"],
        ["logging.run_dir must be a folder", "recipe.yaml is a file"],
    ),
    "no such task": (
        ["rollouts={type: sampler, task: sorte, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}"],
        ["rollouts.task: must be a registered task, got 'sorte'; did you mean 'sort'?"],
    ),
    "vocabulary too small for the task": (
        [
            "rollouts={type: sampler, task: sort, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}",
            "model.architecture.vocab_size=200",
        ],
        ["vocab_size must be >= the 259 tokens of the task 'sort'", "got 200", "raise it"],
    ),
    "responses too long for the model": (
        ["rollouts={type: sampler, task: sort, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 40}"],
        ["max_sequence_length = 32", "got 46"],
    ),
}


@pytest.mark.parametrize("case", BAD_RECIPES)
def test_a_recipe_that_does_not_fit(case, folder):
    overrides, parts = BAD_RECIPES[case]
    expect_refusal(folder, ["train", "recipe.yaml", *overrides], parts)


def test_the_good_recipe_of_these_cases_trains(folder):
    """Otherwise the refusals above would prove nothing."""
    results = run_ranks(2, command, folder, ["train", "recipe.yaml", "logging.tensorboard=false"])
    assert [code for code, _, _ in results] == [0, 0], results
    assert results[0][1].splitlines()[-1] == "reward 1.000 -> 1.000" and results[1][1] == ""
    assert len(list((folder / "runs").iterdir())) == 1


def test_validate_says_what_it_found(folder):
    code, out, err = run_ranks(1, command, folder, ["validate", "recipe.yaml"])[0]
    assert (code, err) == (0, "")
    assert "recipe.yaml: valid on 2 ranks" in out
    assert "3 sequences, 9 response tokens, longest 5" in out


def test_validate_takes_the_number_of_ranks(folder):
    expect_refusal(
        folder, ["validate", "recipe.yaml", "--ranks", "3"], ["must divide the number of ranks, got 3"], world=1
    )


def test_doctor_names_versions_and_what_is_in_use(folder):
    code, out, _ = run_ranks(1, command, folder, ["doctor"])[0]
    assert code == 0
    for word in ("torch", "megatron-core", "Transformer Engine", "Apex", "Triton", "gloo", "threads", "optimizer"):
        assert word in out
    assert "a run can start on this machine" in out


def test_ranks_of_their_own_end_with_our_exit_code_and_no_traceback(folder):
    """``--ranks``: real processes, as torchrun starts them. The error is one that only they can find."""
    program = [
        sys.executable,
        "-m",
        "megatron_support",
        "train",
        "recipe.yaml",
        "train.microbatch.max_tokens=4",
        "--ranks",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ") and "raise train.microbatch.max_tokens" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()
