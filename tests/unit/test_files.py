"""Rollout files: what is written is read back, and a fault is named by file, line, field and remedy."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_support.errors import RolloutError
from megatron_support.rollouts import concatenate, read_rollouts, write_rollouts
from megatron_support.rollouts.batch import shortest_decimal
from tests.rollout_batch import assert_same, make_rollouts

EXAMPLE = Path(__file__).parents[2] / "examples/data/smollm2_topk40_topp90.jsonl"
INF, NAN = math.inf, math.nan

ROW: dict[str, Any] = {
    "id": "a-0",
    "prompt_id": "a",
    "prompt": "p",
    "response": "r",
    "tokens": [1, 2, 3, 4],
    "response_mask": [0, 0, 1, 1],
    "generation_logprobs": [0.0, 0.0, -0.5, -1.5],
    "reward": 1.0,
    "sampling": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "support": {"token_ids": [3, 9, 4], "offsets": [0, 0, 0, 2, 3]},
}


def row(**changes: Any) -> dict[str, Any]:
    """A good row with changes; ``sampling__top_k=0`` reaches into an inner mapping, ``...`` removes the field."""
    result = copy.deepcopy(ROW)
    for name, value in changes.items():
        *outer, last = name.split("__")
        target = result[outer[0]] if outer else result
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return result


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("support", [False, True])
def test_every_column_comes_back(tmp_path, ending, support):
    rollouts: Any = make_rollouts([3, 5, 2], support=support)
    total = int(rollouts.cu_seqlens[-1])
    rollouts = rollouts.with_columns(
        generation_logprobs=rollouts.generation_logprobs.index_fill(0, torch.tensor([1]), -INF),
        prev_logprobs=rollouts.prev_logprobs.index_fill(0, torch.tensor([2, 5]), -INF),
        prev_logprobs_unfiltered=torch.linspace(-3, 0, total),
        teacher_logprobs=torch.linspace(-1, 0, total),
        advantages=torch.linspace(-1, 1, total),
        reward_components=torch.tensor([[0.1, 2], [0, 1], [3, -1e-3]]),
        temperature=torch.tensor([0.7, 1.0, 1 / 3]),
        top_k=torch.tensor([40, 0, 7]),
        top_p=torch.tensor([0.9, 1 - 2**-24, 1.0]),
    )
    path = tmp_path / f"rollouts.{ending}"
    write_rollouts(path, rollouts)
    assert_same(read_rollouts(path), rollouts)


def test_both_formats_hold_the_same_rows(tmp_path):
    write_rollouts(tmp_path / "a.parquet", read_rollouts(EXAMPLE))
    assert_same(read_rollouts(tmp_path / "a.parquet", vocab_size=49152), read_rollouts(EXAMPLE, vocab_size=49152))


def test_the_shipped_rollouts_are_real_and_filtered():
    rollouts = read_rollouts(EXAMPLE, vocab_size=49152)
    assert rollouts.num_sequences == 32 and bool(rollouts.filtering.all())
    assert rollouts.top_k.unique().tolist() == [40] and rollouts.support is not None
    sizes = rollouts.support.offsets.diff()
    assert bool((sizes[rollouts.response_mask] >= 1).all()) and int(sizes.max()) <= 40
    assert int(rollouts.tokens.max()) < 49152
    with pytest.raises(RolloutError, match=r"jsonl:1: tokens\[\d+\]: must be in the vocabulary \[0, 1000\)"):
        read_rollouts(EXAMPLE, vocab_size=1000)


def test_rows_of_one_prompt_are_one_group_and_masked_entries_are_not_read(tmp_path):
    rows = [
        row(id=i, prompt_id=prompt, generation_logprobs=[None, NAN, -1, -INF], sample_mask=i != 2)
        for i, prompt in enumerate(["x", 7, "x"])
    ]
    rollouts: Any = read_rollouts(write_lines(tmp_path / "a.jsonl", *rows))
    assert rollouts.group_ids.tolist() == [0, 1, 0]
    assert rollouts.sample_mask.tolist() == [True, True, False]
    assert rollouts.generation_logprobs.view(3, 4).tolist() == [[0, 0, -1, -INF]] * 3


def test_optional_columns_may_hold_anything_outside_the_response(tmp_path):
    columns = {"prev_logprobs": [None, NAN, -1, -INF], "reference_logprobs": [-INF, -3, -1, -2]}
    rollouts: Any = read_rollouts(write_lines(tmp_path / "a.jsonl", row(**columns)))
    assert rollouts.prev_logprobs.tolist() == [0, 0, -1, -INF]
    assert rollouts.reference_logprobs.tolist() == [0, -3, -1, -2]


def test_empty_lines_and_unknown_fields_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(row(engine="some")) + "\r\n\n  \n" + json.dumps(row(id="b")))
    assert read_rollouts(path).sample_ids == ("a-0", "b")


BIG = 10**400
LOGPROBS = "generation_logprobs"
FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no tokens": ({"tokens": ...}, "tokens: required and missing", "add it"),
    "tokens null": ({"tokens": None}, "tokens: required and missing", "add it"),
    "tokens text": ({"tokens": "1 2"}, "tokens: must be a list, got '1 2'", "correct it"),
    "one token": ({"tokens": [1]}, "tokens: must hold a prompt and a response, got 1", "drop the row"),
    "token outside": ({"tokens": [1, 2, 50, 4]}, "tokens[2]: must be in the vocabulary [0, 50), got 50", "tokenizer"),
    "token negative": ({"tokens": [1, 2, -1, 4]}, "tokens[2]: must be in the vocabulary [0, 50), got -1", "tokenizer"),
    "token float": ({"tokens": [1, 2.0, 3, 4]}, "tokens[1]: must be an integer token id, got 2.0", "correct"),
    "token bool": ({"tokens": [1, True, 3, 4]}, "tokens[1]: must be an integer token id, got True", "correct"),
    "token text": ({"tokens": [1, "2", 3, 4]}, "tokens[1]: must be an integer token id, got '2'", "correct"),
    "token huge": ({"tokens": [1, BIG, 3, 4]}, "tokens[1]: must be in the vocabulary", "tokenizer"),
    "mask short": ({"response_mask": [0, 1, 1]}, "response_mask: must have 4 entries, got 3", "one for each token"),
    "mask of two": ({"response_mask": [0, 0, 2, 1]}, "response_mask[2]: must be 0 or 1, got 2", "correct"),
    "mask float": ({"response_mask": [0, 0, 1.0, 1]}, "response_mask[2]: must be 0 or 1, got 1.0", "correct"),
    "no response": ({"response_mask": [0] * 4}, "response_mask: must mark at least one response token", "drop the row"),
    "response first": ({"response_mask": [1] * 4}, "response_mask[0]: must be 0", "add a prompt token"),
    "no logprobs": ({"generation_logprobs": ...}, "generation_logprobs: required and missing", "add it"),
    "logprobs short": ({LOGPROBS: [-1, -1]}, "generation_logprobs: must have 4 entries, got 2", "one for"),
    "logprob null": ({LOGPROBS: [0, 0, None, -1]}, "generation_logprobs[2]: missing", "ask the engine"),
    "logprob NaN": (
        {LOGPROBS: [0, 0, -1, NAN]},
        "generation_logprobs[3]: must be a number, got nan",
        "drop",
    ),
    "logprob inf": (
        {LOGPROBS: [0, 0, INF, -1]},
        "generation_logprobs[2]: must be <= 0, got inf",
        "give log",
    ),
    "probability": (
        {LOGPROBS: [0, 0, 0.5, -1]},
        "generation_logprobs[2]: must be <= 0, got 0.5",
        "give log",
    ),
    "logprob text": ({LOGPROBS: [0, 0, "-1", -1]}, "generation_logprobs[2]: must be a number", "correct"),
    "logprob bool": ({LOGPROBS: [0, 0, False, -1]}, "generation_logprobs[2]: must be a number", "correct"),
    "logprob huge": (
        {LOGPROBS: [0, 0, -BIG, -1]},
        "generation_logprobs[2]: must fit into fp32",
        "-Infinity",
    ),
    "logprob -1e39": ({LOGPROBS: [0, 0, -1e39, -1]}, "generation_logprobs[2]: must fit into fp32", "-Inf"),
    "-inf unfiltered": (
        {LOGPROBS: [0, 0, -INF, -1], "sampling": {"temperature": 1.0}, "support": None},
        "generation_logprobs[2]: must be finite without top_k, top_p < 1 or support, got -inf",
        "give the row's sampling filter",
    ),
    "no reward": ({"reward": ...}, "reward: required and missing", "add it"),
    "reward NaN": ({"reward": NAN}, "reward: must be a finite number, got nan", "drop the row"),
    "reward huge": ({"reward": BIG}, "reward: must be a finite number", "drop the row"),
    "reward bool": ({"reward": True}, "reward: must be a number, got True", "correct it"),
    "components": (
        {"reward_components": [1, "x"]},
        "reward_components[1]: must be a finite number, got 'x'",
        "correct",
    ),
    "no components": ({"reward_components": []}, "reward_components: must hold at least one number", "leave the field"),
    "no sampling": ({"sampling": ...}, "sampling: required and missing", "add it"),
    "sampling list": ({"sampling": [1]}, "sampling: must be an object with temperature, top_k and top_p", "correct it"),
    "no temperature": ({"sampling__temperature": ...}, "sampling.temperature: required and missing", "add it"),
    "greedy": ({"sampling__temperature": 0}, "sampling.temperature: must be > 0 and finite, got 0", "use top_k 1"),
    "hot": ({"sampling__temperature": BIG}, "sampling.temperature: must be > 0 and finite", "use top_k 1"),
    "cold": ({"sampling__temperature": 1e-46}, "sampling.temperature: must be > 0 and finite, got 1e-46", "top_k 1"),
    "top_k 0": ({"sampling__top_k": 0}, "sampling.top_k: must be an integer >= 1, got 0", "use null"),
    "top_k float": ({"sampling__top_k": 4.0}, "sampling.top_k: must be an integer >= 1, got 4.0", "use null"),
    "top_k bool": ({"sampling__top_k": True}, "sampling.top_k: must be an integer >= 1, got True", "use null"),
    "top_k huge": ({"sampling__top_k": BIG}, "sampling.top_k: must be an integer >= 1", "use null"),
    "top_p 0": ({"sampling__top_p": 0}, "sampling.top_p: must be in (0, 1], got 0", "use 1.0"),
    "top_p 2": ({"sampling__top_p": 1.5}, "sampling.top_p: must be in (0, 1], got 1.5", "use 1.0"),
    "top_p NaN": ({"sampling__top_p": NAN}, "sampling.top_p: must be in (0, 1], got nan", "use 1.0"),
    "support list": ({"support": [1]}, "support: must be null or an object with token_ids and offsets", "null or"),
    "no offsets": ({"support__offsets": ...}, "support.offsets: required and missing", "add it"),
    "offsets short": ({"support__offsets": [0, 3]}, "support.offsets: must have 5 entries, got 2", "one for each"),
    "offsets float": ({"support__offsets": [0, 0, 0, 2.0, 3]}, "support.offsets: must be integers", "correct them"),
    "offsets unsorted": (
        {"support__offsets": [0, 0, 2, 1, 3]},
        "support.offsets: must ascend from 0",
        "one more offset",
    ),
    "offsets start": ({"support__offsets": [1, 1, 1, 2, 3]}, "support.offsets: must ascend from 0", "one more offset"),
    "offsets end": (
        {"support__offsets": [0, 0, 0, 2, 2]},
        "support.offsets: must ascend from 0 to the number of token_ids 3, got 0 ... 2",
        "one more offset than tokens",
    ),
    "offsets huge": ({"support__offsets": [0, 0, 0, 2, 2**62]}, "support.offsets: must ascend from 0", str(2**62)),
    "own set": ({"support__token_ids": [3, 9, 5]}, "support: token 3 (4) is missing from its own kept set", "drop"),
    "empty set": ({"support__offsets": [0, 0, 0, 3, 3]}, "support: token 3 (4) is missing from its own kept", "drop"),
    "kept outside": (
        {"support__token_ids": [3, 50, 4]},
        "support.token_ids[1]: must be in the vocabulary",
        "tokenizer",
    ),
    "no id": ({"id": ...}, "id: required and missing", "add it"),
    "id list": ({"id": []}, "id: must be a string or an integer, got []", "correct it"),
    "id bool": ({"id": True}, "id: must be a string or an integer, got True", "correct it"),
    "prompt_id float": ({"prompt_id": 0.5}, "prompt_id: must be a string or an integer, got 0.5", "correct it"),
    "prompt number": ({"prompt": 3}, "prompt: must be a string, got 3", "correct it"),
    "sample_mask 2": ({"sample_mask": 2}, "sample_mask: must be 0 or 1, got 2", "correct it"),
    "column short": ({"values": [0.0]}, "values: must have 4 entries, got 1", "one for each token"),
    "column NaN": ({"prev_logprobs": [0, 0, NAN, -1]}, "prev_logprobs[2]: must be a finite number, or -Inf", "correct"),
    "column +inf": (
        {"prev_logprobs": [0, 0, INF, -1]},
        "prev_logprobs[2]: must be a finite number, or -Inf",
        "correct",
    ),
    "column -1e39": ({"prev_logprobs": [0, 0, -1e39, -1]}, "prev_logprobs[2]: must be a finite number, or", "correct"),
    "reference -inf": ({"reference_logprobs": [0, 0, -1, -INF]}, "reference_logprobs[3]: must be a finite", "drop"),
    "value null": ({"values": [0, 0, 1, None]}, "values[3]: must be a finite number, got None", "correct"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_row_names_line_field_and_remedy(tmp_path, fault):
    changes, message, remedy = FAULTS[fault]
    path = write_lines(tmp_path / "a.jsonl", row(id="good"), row(**changes))
    with pytest.raises(RolloutError) as caught:
        read_rollouts(path, vocab_size=50)
    text = str(caught.value)
    assert text.startswith(f"{path}:2: {message}"), text
    assert remedy in text and len(text) < 600


def test_the_fault_of_a_parquet_row_names_the_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    bad = row(id="b", generation_logprobs=[0.0, 0.0, None, -1.0])
    pq.write_table(pa.Table.from_pylist([row(), bad]), path)
    with pytest.raises(RolloutError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}:row 2: generation_logprobs[2]: missing at a response token; ask")


TEXTS: dict[str, tuple[bytes, str]] = {
    "bad JSON": (b'{"id": 1,}\n', "not valid JSON"),
    "cut off": (json.dumps(ROW).encode()[:50], "not valid JSON"),
    "deep JSON": (b"[" * 100_000, "not valid JSON"),
    "digits": (b'{"tokens": [' + b"9" * 5000 + b"]}", "not valid JSON"),
    "not UTF-8": (b'{"id": "\xff\xfe"}', "not UTF-8 text"),
    "a list": (b"[1, 2]", "a row must be an object of fields, got [1, 2]"),
    "a number": (b"NaN", "a row must be an object of fields, got nan"),
    "null": (b"null", "a row must be an object of fields, got None"),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_a_bad_line_is_named_by_its_number(tmp_path, fault):
    content, message = TEXTS[fault]
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(ROW).encode() + b"\n\n" + content + b"\n")
    with pytest.raises(RolloutError) as caught:
        read_rollouts(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:3: {message}") and "; write" in text, text


def test_samples_have_names_of_their_own(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", row(id=7), row(id="b"), row(id="7"))
    with pytest.raises(RolloutError, match=r"a\.jsonl:3: id: must be unique, got '7' as in .*a\.jsonl:1; rename one"):
        read_rollouts(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": [0, 0, 1, 1]}, "2: values: must be in every row or in none, missing in 'b'; add it"),
        ({"support": None}, "1: support: must be in every row or null in all, null in 'a-0'; split the file"),
        (
            {"reward_components": [1]},
            "2: reward_components: must have the same number of entries in every row, got 1 in 'a-0' and 0 in 'b'",
        ),
    ],
)
def test_optional_fields_are_in_every_row_or_in_none(tmp_path, changes, message):
    path = write_lines(tmp_path / "a.jsonl", row(**changes), row(id="b"))
    with pytest.raises(RolloutError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}:{message}")


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps([ROW]))


def _truncated(path: Path) -> None:
    write_rollouts(path, make_rollouts([3, 3]))
    path.write_bytes(path.read_bytes()[:-40])


def _corrupt(path: Path) -> None:
    write_rollouts(path, make_rollouts([3] * 200))
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)


def _bad_text(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Arrow does not look into a text column that is made from a buffer
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe"))
    pq.write_table(pa.table({"id": text}), path)


UNREADABLE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("a.jsonl", lambda path: None, "cannot read it"),
    "missing parquet": ("a.parquet", lambda path: None, "cannot read it"),
    "folder": ("a.jsonl", lambda path: path.mkdir(), "cannot read it"),
    "ending": ("a.json", lambda path: path.touch(), "the name must end in .jsonl or .parquet, got '.json'"),
    "no ending": ("a", lambda path: path.touch(), "the name must end in .jsonl or .parquet, got ''"),
    "empty": ("a.jsonl", lambda path: path.touch(), "no rollouts in it"),
    "blank": ("a.jsonl", lambda path: path.write_text("\n \n"), "no rollouts in it"),
    "empty parquet": ("a.parquet", lambda path: path.touch(), "cannot read it"),
    "pickle": ("a.parquet", _pickle, "cannot read it"),
    "truncated": ("a.parquet", _truncated, "cannot read it"),
    "corrupt": ("a.parquet", _corrupt, "cannot read it"),
    "bad text": ("a.parquet", _bad_text, "cannot read it"),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_an_unreadable_file_is_named_with_a_remedy(tmp_path, fault):
    name, prepare, message = UNREADABLE[fault]
    path = tmp_path / name
    prepare(path)
    with pytest.raises(RolloutError) as caught:
        read_rollouts(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert any(
        remedy in str(caught.value) for remedy in ("; give a readable", "; convert or rename it", "; write one row")
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [("none/a.jsonl", "cannot write"), ("none/a.parquet", "cannot write"), ("a.csv", "must end in")],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path, name, message):
    with pytest.raises(RolloutError, match=f"{name}: .*{message}"):
        write_rollouts(tmp_path / name, make_rollouts([3]))


@given(st.floats(min_value=2.0**-20, max_value=2.0**20, width=32))
def test_the_shortest_decimal_is_the_same_number(value):
    assert torch.tensor(shortest_decimal(value), dtype=torch.float32).item() == value
    assert shortest_decimal(torch.tensor(0.9).item()) == 0.9


def test_files_of_one_run_are_joined_with_their_groups_apart(tmp_path):
    first, second = make_rollouts([3, 2, 4], support=True), make_rollouts([2, 5], support=True)
    joined = concatenate([first, second])
    assert joined.group_ids.tolist() == [0, 0, 1, 2, 2]
    assert joined.sample_ids == ("0:s0", "0:s1", "0:s2", "1:s0", "1:s1")
    for part, indices in ((first, [0, 1, 2]), (second, [3, 4])):
        again = joined.select(torch.tensor(indices))
        assert_same(again.with_columns(group_ids=part.group_ids, sample_ids=part.sample_ids), part)
    assert concatenate([first]) is first


def test_what_cannot_be_joined_is_named():
    first = make_rollouts([3])
    with pytest.raises(RolloutError, match="values must be in every batch or in none, it is missing in batch 1"):
        concatenate([first, first.with_columns(values=None)])
    with pytest.raises(RolloutError, match="at least one batch"):
        concatenate([])
