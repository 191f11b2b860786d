"""The run folder and the report at the end, worked out by hand."""

import errno
import io
import json
import math
import os
import tempfile

import pytest
import torch
import yaml
from rich.console import Console

from megatron_support.config import Recipe, load_recipe
from megatron_support.errors import ConfigurationError
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.rollouts.files import read_rollouts
from megatron_support.training.exclusions import Exclusions, count_exclusions
from megatron_support.training.folder import RunFolder, _cut
from megatron_support.training.resume import _continues
from megatron_support.training.summary import Summary, print_summary

OUT = -math.inf


def recipe(tmp_path, **changes) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "run",
            "model": {
                "architecture": {
                    "vocab_size": 259,
                    "num_layers": 2,
                    "hidden_size": 16,
                    "num_attention_heads": 2,
                    "ffn_hidden_size": 32,
                },
            },
            "optimizer": {"lr": 0.1},
            "rollouts": {
                "type": "sampler",
                "task": "sort",
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_new_tokens": 4,
            },
            "train": {"steps": 8, "microbatch": {"max_tokens": 64}},
            "logging": {"run_dir": str(tmp_path / "runs")},
            **changes,
        }
    )


def batch(**changes) -> RolloutBatch:
    """Three sequences of one prompt and three response tokens; the second is masked, the third not filtered."""
    columns = {
        "tokens": torch.arange(12),
        "cu_seqlens": torch.tensor([0, 4, 8, 12]),
        "response_mask": torch.tensor([False, True, True, True] * 3),
        "rewards": torch.tensor([1.0, 0.0, 0.5]),
        "sample_mask": torch.tensor([True, False, True]),
        "group_ids": torch.tensor([0, 0, 0]),
        "temperature": torch.ones(3),
        "top_k": torch.tensor([5, 5, 0]),
        "top_p": torch.ones(3),
        "sample_ids": ("a", "b", "c"),
        "generation_logprobs": torch.tensor([0, -1, OUT, OUT, 0, OUT, -1, -1, 0, -1, -1, -1.0]),
        "prev_logprobs": torch.tensor([OUT, OUT, OUT, -1, 0, OUT, OUT, -1, 0, -1, -1, -1.0]),
        "prev_logprobs_unfiltered": torch.tensor([0, -3, -5, -1, 0, -9, -9, -1, 0, -1, -1, -1.0]),
    }
    return RolloutBatch(**{**columns, **changes})


def test_each_excluded_token_counts_for_one_source():
    # a: token 1 previous, token 2 previous (and generation), token 3 generation; b is masked; c has no filter
    found = count_exclusions(4, batch(), excluded=5, epochs=1)
    assert found.sources() == {"previous": 2, "generation": 1, "current": 2}
    assert (found.total, found.response_tokens) == (5, 6)
    described = [(t.sample_id, t.position, t.token, t.source, t.trainer_logprob) for t in found.worst]
    assert described == [
        ("a", 2, 2, "previous", -5.0),
        ("a", 1, 1, "previous", -3.0),
        ("a", 3, 3, "generation", -1.0),
    ]
    assert {t.step for t in found.worst} == {4}


def test_a_token_counts_once_for_each_pass():
    found = count_exclusions(1, batch(), excluded=7, epochs=2)
    assert found.sources() == {"previous": 4, "generation": 2, "current": 1}
    assert found.response_tokens == 12


def test_exclusions_add_up_and_keep_the_least_likely():
    parts = [count_exclusions(step, batch(), excluded=3, epochs=1) for step in (1, 2, 3)]
    total = sum(parts, Exclusions())
    assert total.sources() == {"previous": 6, "generation": 3, "current": 0}
    assert [t.trainer_logprob for t in total.worst] == [-5, -5, -5, -3, -3, -3, -1, -1]


def test_nothing_is_excluded_without_log_probabilities():
    found = count_exclusions(1, batch(generation_logprobs=None, prev_logprobs=None), excluded=0, epochs=1)
    assert (found.total, found.worst) == (0, ())


def test_the_folder_is_made_with_the_first_step(tmp_path):
    folder = RunFolder(recipe(tmp_path))
    assert not (tmp_path / "runs").exists()
    folder.write_step(1, {"reward": 0.5, "loss": math.inf})
    folder.write_step(2, {"reward": 0.75, "loss": 1.0})
    folder.write_rollouts(batch())
    folder.close()
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward": 0.5, "loss": "inf"}, {"step": 2, "reward": 0.75, "loss": 1.0}]
    assert list((folder.path / "tensorboard").glob("events.*"))
    assert read_rollouts(folder.path / "rollouts_last_step.jsonl").tokens.tolist() == list(range(12))


def test_the_recipe_in_the_folder_is_the_whole_recipe(tmp_path):
    given = recipe(tmp_path, logging={"run_dir": str(tmp_path / "runs"), "tensorboard": False})
    folder = RunFolder(given)
    folder.write_step(1, {"reward": 0.5})
    assert load_recipe(folder.path / "recipe.yaml") == given
    assert "shuffle" in yaml.safe_load((folder.path / "recipe.yaml").read_text())["train"], "defaults are written too"
    assert not (folder.path / "tensorboard").exists()


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path):
    first = RunFolder(recipe(tmp_path))
    first.path.mkdir(parents=True)
    second = RunFolder(recipe(tmp_path))
    assert second.path != first.path


def test_a_run_dir_inside_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigurationError, match=r"logging\.run_dir must be a folder, got .*file/runs: .*file is a file"
    ):
        RunFolder(recipe(tmp_path, logging={"run_dir": str(tmp_path / "file" / "runs")}))


def test_a_run_dir_that_cannot_be_written_is_refused_and_left_as_it_was(tmp_path, monkeypatch):
    """Root may write everywhere, so permissions say nothing: the folder is tried."""

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    RunFolder(recipe(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(ConfigurationError, match=r"run_dir must be a folder that can.*Read-only file system"):
        RunFolder(recipe(tmp_path))


def summary(tmp_path, rewards) -> Summary:
    return Summary(
        recipe=recipe(tmp_path),
        rewards=rewards,
        exclusions=count_exclusions(1, batch(), excluded=5, epochs=1),
        mismatch=1.04,
        last={"loss": 0.5},
        folder=tmp_path / "runs" / "run-1",
    )


def test_rewards_are_means_over_a_quarter_of_the_run_and_at_most_five_steps(tmp_path):
    assert summary(tmp_path, [0.0, 1.0, 2.0]).window == 1
    eight = summary(tmp_path, [0.0, 0.2, 9, 9, 9, 9, 0.6, 1.0])
    assert (eight.window, eight.first_reward, eight.last_reward) == (2, pytest.approx(0.1), pytest.approx(0.8))
    assert summary(tmp_path, [0.0] * 100).window == 5


def test_the_report_ends_with_the_rewards_and_names_exclusions_and_files(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary(tmp_path, [0.0, 0.2, 9, 9, 9, 9, 0.6, 1.0]), console, lambda token: f"'[{token}]'")
    lines = console.file.getvalue().splitlines()
    assert lines[-1] == "reward 0.100 -> 0.800"
    assert str(tmp_path / "runs" / "run-1") in lines[-2] and "metrics.jsonl" in lines[-2]
    text = "\n".join(lines)
    assert "token_mult_prob_error 1.0400, mean of exp|trainer - engine|" in text
    assert "excluded tokens 5 of 6 response tokens (83.333%)" in text
    for line in ("previous         2", "generation       1", "current          2"):
        assert line in text
    # exp(-5) and exp(-inf): the least likely token first
    row = next(line for line in lines if "'[2]'" in line)
    assert row.split() == ["1", "a", "2", "2", "'[2]'", "previous", "0.00000", "0.00674"]


def test_a_continued_run_keeps_the_whole_lines_up_to_its_step_alone(tmp_path):
    file = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    file.write_bytes(whole + b'[1]\n"text"\n{"loss": 1}\n\xff\xfe\n{"step": 3}\n{"step": 2, "lo')
    _cut(file, 2)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[" * 5000, b"- 1\n", b"name: other\n", None],
    ids=["bytes", "deep", "list", "other", "pipe"],
)
def test_a_run_with_a_damaged_recipe_is_no_run_to_go_on_with(tmp_path, content):
    if content is None:
        os.mkfifo(tmp_path / "recipe.yaml")
    else:
        (tmp_path / "recipe.yaml").write_bytes(content)
    assert not _continues(recipe(tmp_path), tmp_path)
