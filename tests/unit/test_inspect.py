"""``megatron-support inspect``: what it finds in a file, on the terminal and as a page."""

import json
import math
from dataclasses import replace

import pytest
import torch

from megatron_support.__main__ import main
from megatron_support.errors import RolloutError
from megatron_support.rollouts.files import read_rollouts, read_sound_rollouts
from megatron_support.training.report.findings import find_odd
from megatron_support.training.report.rollout_page import rollout_data
from tests.browser import load, needs_chromium

ROW = {
    "tokens": [7, 8, 1, 2],
    "response_mask": [0, 0, 1, 1],
    "generation_logprobs": [0.0, 0.0, -1.0, -0.5],
    "reward": 1.0,
    "prompt_id": 0,
    "sampling": {"temperature": 1.0, "top_k": 2, "top_p": 1.0},
}


def write(path, *changes) -> str:
    rows = [row if isinstance(row, str) else json.dumps({**ROW, "id": f"r{i}", **row}) for i, row in enumerate(changes)]
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def odd_file(path) -> str:
    """Sound and odd rows among rows that cannot be read, on lines 3 and 5."""
    return write(
        path,
        {},
        {"tokens": [7, 8, 1, 3], "reward": 0.0},
        {"reward": None},
        {"generation_logprobs": [0, 0, 0, 0], "prompt_id": 1},
        "{not json",
        {"tokens": [7, 8, 1, 2], "response_mask": [0, 0, 0, 1], "generation_logprobs": [0, 0, 0, -math.inf]},
        {"prompt_id": 2, "sampling": {"temperature": 0.5}, "sample_mask": False, "tokens": [6, 8, 1, 2]},
        {"prompt_id": 2, "generation_logprobs": [0, 0, -1, -16.0]},
    )


def test_sound_rows_are_read_and_the_others_named(tmp_path):
    rollouts, errors = read_sound_rollouts(odd_file(tmp_path / "r.jsonl"))
    assert rollouts.sample_ids == ("r0", "r1", "r3", "r5", "r6", "r7")
    assert [str(error).split(": ", 1)[0].rpartition(":")[2] for error in errors] == ["3", "5"]
    assert "reward: required and missing; add it" in str(errors[0]) and "not valid JSON" in str(errors[1])
    with pytest.raises(RolloutError, match=r"r\.jsonl:3: reward: required"):
        read_rollouts(tmp_path / "r.jsonl")


def test_each_odd_thing_is_found_in_its_rows(tmp_path):
    rollouts, errors = read_sound_rollouts(odd_file(tmp_path / "r.jsonl"))
    found = {finding.text.split(":")[0]: finding.examples for finding in find_odd(rollouts, errors)[2:]}
    assert found == {
        "every generation log-probability is 0": ("r3",),
        "a generation log-probability is -inf": ("r5",),
        "a generation log-probability is below -15": ("r7",),
        "alone in its group": ("r3",),
        "equal rewards in the whole group": ("r6", "r7"),
        "as long as the longest response of several prompts": ("r0", "r1", "r3", "r6"),
        "the same tokens as an earlier sample of its prompt": ("r5",),
        "sample_mask is false": ("r6",),
        "no sampling filter": ("r6",),
    }


def test_responses_of_one_length_were_not_cut_off(tmp_path):
    rollouts, _ = read_sound_rollouts(write(tmp_path / "r.jsonl", {}, {"prompt_id": 1}))
    assert not any("longest response" in finding.text for finding in find_odd(rollouts, []))


def test_an_unknown_filter_is_not_said_to_be_off(tmp_path):
    rollouts, _ = read_sound_rollouts(write(tmp_path / "r.jsonl", {"sampling": {"temperature": 1.0}}))
    assert any("no sampling filter" in finding.text for finding in find_odd(rollouts, []))
    lost = replace(rollouts, unknown_fields=frozenset({"sampling"}))
    (finding,) = [finding for finding in find_odd(lost, []) if "sampling" in finding.text]
    assert finding.text.startswith("sampling is unknown")


def test_kept_sets_are_measured(tmp_path):
    kept = {"token_ids": [1, 2, 3, 2], "offsets": [0, 0, 0, 3, 4]}
    rollouts, errors = read_sound_rollouts(write(tmp_path / "r.jsonl", {"support": kept}, {"support": kept}))
    texts = [finding.text for finding in find_odd(rollouts, errors)]
    assert any(text.startswith("a kept set is larger than top_k") for text in texts)
    data = rollout_data("r.jsonl", rollouts, errors, {})
    sizes = next(chart for chart in data["histograms"] if chart["id"] == "support")
    assert (sizes["edges"], sizes["counts"]) == ([0.5, 1.5, 2.5, 3.5], [2, 0, 2])
    assert data["filters"] == [{"temperature": 1.0, "top_k": 2, "top_p": 1.0, "rows": 2}]


def test_columns_that_some_rows_lack_are_an_error_and_the_rest_is_shown(tmp_path):
    rollouts, errors = read_sound_rollouts(write(tmp_path / "r.jsonl", {"values": [0.0] * 4}, {"tokens": [7, 8, 1, 3]}))
    assert rollouts.num_sequences == 2 and rollouts.values is None
    assert len(errors) == 1 and "values: must be in every row or in none" in str(errors[0])


def test_a_file_of_which_nothing_can_be_read_is_one_error(tmp_path):
    for name in ("gone.jsonl", "file.txt"):
        with pytest.raises(RolloutError):
            read_sound_rollouts(tmp_path / name)
    rollouts, errors = read_sound_rollouts(write(tmp_path / "bad.jsonl", "{", "["))
    assert rollouts is None and len(errors) == 2


def test_the_terminal_says_it_and_the_exit_code_too(tmp_path, capsys):
    assert main(["inspect", odd_file(tmp_path / "r.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "Rows" in out and "2 refused" in out and "r.jsonl:3: reward: required and missing" in out
    assert "1 row    sample_mask is false: it enters no term of the loss (r6)" in out
    good = write(tmp_path / "good.jsonl", {}, {"tokens": [7, 8, 1, 3], "reward": 0.0})
    assert main(["inspect", good]) == 0
    assert "nothing is missing and nothing is odd" in capsys.readouterr().out
    assert main(["inspect", good, "--vocab-size", "8"]) == 1
    assert "must be in the vocabulary [0, 8), got 8" in capsys.readouterr().out


def test_a_file_with_a_trainers_columns_is_shown_as_sampled(tmp_path):
    outside = {"prev_logprobs": [0, 0, -math.inf, -1.0]}
    rollouts, _ = read_sound_rollouts(write(tmp_path / "r.jsonl", outside))
    (sample,) = rollout_data("r.jsonl", rollouts, (), {})["samples"]
    assert sample["excluded"] == 0 and torch.isinf(rollouts.prev_logprobs).sum() == 1


@needs_chromium
def test_the_page_loads_without_errors_and_opens_a_sample(tmp_path):
    page = tmp_path / "page.html"
    assert main(["inspect", odd_file(tmp_path / "r.jsonl"), "--html", str(page)]) == 1
    loaded = load(page, tmp_path / "profile", suffix="#sample=r5")
    assert loaded.console == [] and 'data-ready="true"' in loaded.dom
    charts = loaded.charts()
    for name in ("response-length", "prompt-length", "reward", "generation"):
        assert 'class="bar"' in charts[name]
    assert "sample_mask is false" in charts["findings"] and "not valid JSON" in charts["findings"]
    opened = loaded.dom.split('id="opened-sample"')[1].split("</article>")[0]
    assert "sample r5" in opened and "token id out" in opened


def test_a_file_of_another_program_gets_the_command_that_converts_it(tmp_path, capsys):
    foreign = write(tmp_path / "theirs.jsonl", '{"input": "a", "output": "b", "score": 1.0, "step": 1}')
    assert main(["inspect", foreign]) == 1
    assert f"megatron-support convert {foreign} OUT.parquet" in " ".join(capsys.readouterr().out.split())
    assert main(["inspect", odd_file(tmp_path / "r.jsonl")]) == 1
    assert "convert" not in capsys.readouterr().out
