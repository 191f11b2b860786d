"""Dumps of other programs: what they hold arrives, what they have lost is said, damage is named by its place."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_support.errors import RolloutError
from megatron_support.rollouts import read_rollouts, write_rollouts
from megatron_support.rollouts.readers import FORMATS, Assumptions, read_dump
from tests import dumps
from tests.rollout_batch import assert_same, make_rollouts

FILTER = Assumptions(sampling={"temperature": 0.7, "top_p": 0.9})
LOST = {"sampling": "temperature 1 without top-k and top-p stands for it"}


def column(values: list[list[float]]) -> list[float]:
    """A column of both samples, 0 at their prompts."""
    return [entry for row in values for entry in (0.0, 0.0, *row)]


@pytest.mark.parametrize("name", dumps.WRITERS)
def test_what_a_dump_holds_arrives(tmp_path, name):
    dump = read_dump(dumps.WRITERS[name](tmp_path), vocab_size=100)
    rollouts: Any = dump.rollouts
    assert dump.format == name.removesuffix("_train")
    assert rollouts.tokens.tolist() == [*dumps.PROMPT, *dumps.RESPONSES[0], *dumps.PROMPT, *dumps.RESPONSES[1]]
    assert rollouts.cu_seqlens.tolist() == [0, 5, 9]
    assert rollouts.response_mask.int().tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert rollouts.generation_logprobs.tolist() == column(dumps.GENERATION)  # exact in fp16 too
    assert rollouts.group_ids.tolist() == [0, 0]
    assert rollouts.sample_mask.tolist() == [True, name != "slime"]  # the rollout dump removes its second sample
    if "rewards" in rollouts.unknown_fields:
        assert any(note.startswith("rewards") for note in dump.notes)
    else:
        assert rollouts.rewards.tolist() == dumps.REWARDS


@pytest.mark.parametrize("name", dumps.WRITERS)
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_dump_written_in_our_schema_is_the_same_and_keeps_what_is_unknown(tmp_path, name, ending):
    first = read_dump(dumps.WRITERS[name](tmp_path))
    path = tmp_path / f"converted.{ending}"
    write_rollouts(path, first.rollouts)
    assert_same(read_rollouts(path), first.rollouts)
    again = read_dump(path)
    assert_same(again.rollouts, first.rollouts)
    assert again.format == ending and "sampling: unknown, as the file says of itself" in again.notes
    given = read_dump(path, assumptions=FILTER).rollouts
    assert given.unknown_fields == first.rollouts.unknown_fields - {"sampling"} and bool(given.filtering.all())
    write_rollouts(path, given)
    with pytest.raises(RolloutError, match="sampling: the row has its own; give none for it"):
        read_dump(path, assumptions=FILTER)


@pytest.mark.parametrize("name", dumps.WRITERS)
def test_sampling_is_unknown_until_it_is_given(tmp_path, name):
    path = dumps.WRITERS[name](tmp_path)
    given = read_dump(path, assumptions=FILTER)
    assert "sampling" not in given.rollouts.unknown_fields and not any("sampling:" in note for note in given.notes)
    assert given.rollouts.top_p.tolist() == pytest.approx([0.9, 0.9]) and bool(given.rollouts.filtering.all())
    unknown = read_dump(path)
    assert "sampling" in unknown.rollouts.unknown_fields
    assert any(LOST["sampling"] in note for note in unknown.notes)


def test_columns_of_each_format(tmp_path):
    for name, ours in (
        ("nemo_rl", "prev_logprobs"),
        ("prime_rl", "curr_logprobs"),
        ("slime_train", "prev_logprobs"),
        ("skyrl", "prev_logprobs"),
    ):
        rollouts = read_dump(dumps.WRITERS[name](tmp_path)).rollouts
        values = torch.where(rollouts.response_mask, getattr(rollouts, ours), 0.0)
        assert values.tolist() == column(dumps.PREVIOUS), name
        assert rollouts.advantages is not None
        wanted = column([[0.5] * 3, [-0.5] * 2])
        assert torch.where(rollouts.response_mask, rollouts.advantages, 0.0).tolist() == wanted, name


def test_nemo_rl_has_lost_who_was_outside_and_the_note_counts_zeros(tmp_path):
    rows = dumps.nemo_rl_rows()
    rows[0]["prev_logprobs"][0][3] = 0.0  # what it writes for -inf
    dump = read_dump(dumps.write_lines(tmp_path / "train_data_step1.jsonl", rows))
    assert "prev_logprobs" in dump.rollouts.unknown_fields
    assert any("is lost; 1 response tokens hold the 0.0" in note for note in dump.notes)


def test_nemo_rl_takes_the_rewards_that_were_trained_on(tmp_path):
    rows = dumps.nemo_rl_rows()
    rows[0] |= {"filtered_rewards": [0.25]}
    dump = read_dump(dumps.write_lines(tmp_path / "a.jsonl", rows))
    assert dump.rollouts.rewards.tolist() == [0.25, 0.0]


@pytest.mark.parametrize("nonfinite", ["refuse", "outside", "mask"])
def test_null_of_prime_rl_is_not_finite_and_taken_as_its_user_says(tmp_path, nonfinite):
    rows = dumps.prime_rl_rows()
    rows[0]["trainer_logprobs"][3] = None
    path = dumps.write_lines(tmp_path / "rank_0.jsonl", rows)
    assumptions = Assumptions(sampling=FILTER.sampling, nonfinite=nonfinite)
    if nonfinite == "refuse":
        with pytest.raises(RolloutError, match=r"rank_0.jsonl:1: trainer_logprobs, read as curr_logprobs\[3\]: null"):
            read_dump(path, assumptions=assumptions)
        return
    dump = read_dump(path, assumptions=assumptions)
    value = dump.rollouts.curr_logprobs[3].item()
    assert value == (-math.inf if nonfinite == "outside" else 0.0)
    assert dump.rollouts.sample_mask.tolist() == [nonfinite == "outside", True]
    assert any("null at 1 response tokens" in note for note in dump.notes)


def test_an_advantage_of_null_is_never_minus_infinity(tmp_path):
    rows = dumps.prime_rl_rows()
    rows[1]["advantages"][3] = None
    path = dumps.write_lines(tmp_path / "rank_0.jsonl", rows)
    with pytest.raises(RolloutError, match=r"jsonl:2: advantages\[3\]: null .* --nonfinite mask"):
        read_dump(path, assumptions=Assumptions(sampling=FILTER.sampling, nonfinite="outside"))


def test_prime_rl_without_rewards_or_advantages(tmp_path):
    rows = dumps.prime_rl_rows(rewards=False)
    for row in rows:
        row["advantages"] = [None] * len(row["token_ids"])
    dump = read_dump(dumps.write_lines(tmp_path / "rank_0.jsonl", rows))
    assert dump.rollouts.advantages is None and "rewards" in dump.rollouts.unknown_fields
    assert any(note.startswith("rewards: not in 2 rows") for note in dump.notes)


def test_all_ranks_of_a_prime_rl_step_are_one_batch(tmp_path):
    for rank in range(2):
        rows = [{**row, "rank": rank} for row in dumps.prime_rl_rows()]
        dumps.write_lines(tmp_path / f"rank_{rank}.jsonl", rows)
    rollouts = read_dump(tmp_path).rollouts
    assert rollouts.sample_ids == ("3-0-0", "3-0-1", "3-1-0", "3-1-1")


def test_slime_keeps_the_samplers_sets(tmp_path):
    rollouts: Any = read_dump(dumps.WRITERS["slime"](tmp_path)).rollouts
    sizes = [0, 0, 2, 1, 3, 0, 0, 1, 2]
    assert rollouts.support.offsets.diff().tolist() == sizes
    assert rollouts.support.token_ids.tolist() == [13, 20, 14, 15, 21, 22, 16, 17, 23]
    assert rollouts.sample_ids == ("40", "41") and rollouts.responses == ("response 0", "response 1")


def test_slime_chooses_among_rewards_by_name(tmp_path):
    content = dumps.slime_rollout()
    for number, sample in enumerate(content["samples"]):
        sample["reward"] = {"correct": number, "length": 5.0}
    path = dumps.save(tmp_path / "a.pt", content)
    with pytest.raises(RolloutError, match=r"a.pt:sample 1: reward: several by name .*--reward-key"):
        read_dump(path)
    dump = read_dump(path, assumptions=Assumptions(reward_key="correct"))
    assert dump.rollouts.rewards.tolist() == [0.0, 1.0]


def test_a_bank_says_that_its_logprobs_are_rounded(tmp_path):
    group = dumps.bank_group()
    group["logprobs"][0][0][1] = -8.001
    dump = read_dump(dumps.write_bank(tmp_path / "bank", [group]))
    assert any("fp16" in note for note in dump.notes)
    assert dump.rollouts.generation_logprobs[3].item() == -8.0


def test_turns_of_a_bank_that_continue_each_other_are_one_row_and_others_are_rows_of_their_own(tmp_path):
    group = {
        "uid": "gen-000003/0",
        "reward": [1.0, 0.5, 0.0],
        "turns": [[[1, 2, 3], [1, 2, 3, 4, 5]], [[1, 2, 3], [1, 9, 8]], []],
        "masks": [[[0, 0, 1], [0, 0, 0, 0, 1]], [[0, 0, 1], [0, 0, 1]], []],
        "logprobs": [[[-1.0], [-2.0]], [[-3.0], [-4.0]], []],
    }
    dump = read_dump(dumps.write_bank(tmp_path / "bank", [group]))
    rollouts: Any = dump.rollouts
    assert rollouts.sample_ids == ("gen-000003/0/0", "gen-000003/0/1/0", "gen-000003/0/1/1")
    assert rollouts.response_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1]
    assert rollouts.generation_logprobs.tolist() == [0, 0, -1, 0, -2, 0, 0, -3, 0, 0, -4]
    assert any("1 rollouts without a trajectory" in note for note in dump.notes)


def test_rows_without_a_response_token_are_left_out_and_counted(tmp_path):
    rows = dumps.nemo_rl_rows()
    rows[0]["token_loss_mask"] = [[0.0] * 5]
    dump = read_dump(dumps.write_lines(tmp_path / "a.jsonl", rows))
    assert dump.rollouts.num_sequences == 1
    assert any("1 rows without a response token are left out" in note and "a.jsonl:1" in note for note in dump.notes)


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


@pytest.mark.parametrize("name", ["batch.pkl", "batch.pt", "batch.jsonl", "batch.parquet"])
def test_a_pickle_is_refused_under_every_name_with_the_way_to_convert_it(tmp_path, name):
    path, touched = tmp_path / name, tmp_path / "touched"
    path.write_bytes(pickle.dumps({"sequences": Hostile(touched)}))
    with pytest.raises(RolloutError, match=r"a pickle, which can run anything .* torch\.save"):
        read_dump(path)
    assert not touched.exists()


@pytest.mark.parametrize("format", ["slime", "skyrl", None])
def test_nothing_of_a_torch_file_runs(tmp_path, format):
    touched = tmp_path / "touched"
    path = dumps.save(tmp_path / "a.pt", {"samples": [Hostile(touched)]})
    with pytest.raises(RolloutError, match=r"a.pt: data.pkl byte \d+: holds .*neither a plain value nor a tensor"):
        read_dump(path, format=format)
    assert not touched.exists()


def test_an_old_torch_file_is_a_pickle(tmp_path):
    path = tmp_path / "a.pt"
    torch.save(dumps.slime_rollout(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(RolloutError, match="a pickle"):
        read_dump(path)


def lines(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Change the rows of a JSONL file."""

    def apply(path: Path) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        change(rows)
        dumps.write_lines(path, rows)

    return apply


def content(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change what a torch file holds."""

    def apply(path: Path) -> None:
        data = torch.load(path, weights_only=True)
        change(data)
        torch.save(data, path)

    return apply


def ledger(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """Change the records of a bank; their checksums are those of what they were."""
    return lambda path: lines(change)(next(path.rglob("ledger.log")))


def cut(size: int, name: str | None = None) -> Callable[[Path], None]:
    """Cut a file off."""

    def apply(path: Path) -> None:
        file = path if name is None else next(path.rglob(name))
        file.write_bytes(file.read_bytes()[:size])

    return apply


def put(*keys: Any) -> Callable[[Any], None]:
    """Set ``data[key]...[last key] = value``."""

    def apply(data: Any) -> None:
        *outer, last, value = keys
        for key in outer:
            data = data[key]
        data[last] = value

    return apply


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "nemo cut": ("nemo_rl", cut(500), r"step3.jsonl:2: not valid JSON"),
    "nemo long list": ("nemo_rl", lines(put(1, "rewards", [1, 2])), r":2: rewards.*: must have 1 entries, got 2"),
    "nemo length": (
        "nemo_rl",
        lines(put(0, "input_lengths", [10**12])),
        r":1: input_lengths: must be in \[1, 5\], got 1000000000000",
    ),
    "nemo NaN": (
        "nemo_rl",
        lines(put(1, "generation_logprobs", [[0, 0, math.nan, -1, 0]])),
        r":2: generation_logprobs\[2\]: must be a number, got nan; .* \(sample 1\)",
    ),
    "nemo token": (
        "nemo_rl",
        lines(put(1, "token_ids", [[11, 12, "16", 17, 0]])),
        r":2: token_ids, read as tokens\[2\]: must be an integer token id, got '16'",
    ),
    "nemo twice": ("nemo_rl", lines(put(1, "idx", 0)), r":2: id: must be unique, got '0' as in .*:1"),
    "prime version": ("prime_rl", lines(put(0, "schema_version", 2)), r":1: schema_version: must be 1, got 2"),
    "prime short": (
        "prime_rl",
        lines(put(1, "entropy", [1.0])),
        r"rank_0.jsonl:2: entropy: must have 4 entries, got 1",
    ),
    "prime rewards": (
        "prime_rl",
        lines(put(0, "rewards", [1, 1, 1, 2, 1])),
        r":1: rewards: must be the same at every response token",
    ),
    "slime cut": ("slime", cut(900), r"rollout_7.pt: no file of torch.save, or damaged"),
    "slime length": (
        "slime",
        content(put("samples", 1, "response_length", -1)),
        r"rollout_7.pt:sample 2: response_length: must be in \[0, 4\], got -1",
    ),
    "slime logprobs": (
        "slime",
        content(put("samples", 0, "rollout_log_probs", [-1.0])),
        r"pt:sample 1: rollout_log_probs: must have 3 entries, got 1",
    ),
    "slime offsets": (
        "slime",
        content(put("samples", 0, "rollout_top_p_token_offsets", [0, 2, 10**12, 6])),
        r"pt:sample 1: rollout_top_p_token_offsets, read as support.offsets: must ascend",
    ),
    "slime negative offset": (
        "slime",
        content(put("samples", 0, "rollout_top_p_token_offsets", [0, -1, 3, 6])),
        r"pt:sample 1: rollout_top_p_token_offsets, read as support.offsets: must ascend",
    ),
    "slime samples": ("slime", content(put("samples", "many")), r"rollout_7.pt: samples: must be a list, got 'many'"),
    "slime version": (
        "slime_train",
        content(put("format_version", torch.zeros(3))),
        r"train_7.pt: format_version: must be 2, got ",
    ),
    "slime key twice": (
        "slime_train",
        content(put("samples", 1, "sample_index", 40)),
        r"pt:sample 2: id: must be unique, got '40'",
    ),
    "skyrl padding": (
        "skyrl",
        content(put("attention_mask", torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]))),
        r"batch.pt:row 2: attention_mask: must be zeros and then ones, padded on the left",
    ),
    "skyrl missing": (
        "skyrl",
        content(lambda batch: batch.pop("rollout_logprobs")),
        r"batch.pt: rollout_logprobs: required and missing",
    ),
    "skyrl stride": (
        "skyrl",
        content(put("sequences", torch.zeros(1, dtype=torch.int64).expand(2, 10**9))),
        r"batch.pt: sequences: claims 2000000000 numbers, more than the file holds",
    ),
    "bank manifest": ("megatron_bank", cut(30, "MANIFEST.json"), r"MANIFEST.json: cannot read it"),
    "bank outside": (
        "megatron_bank",
        lambda path: (
            (path / "MANIFEST.json").write_text(
                '{"format_version": 2, "active_generation": "generation-0a1b", "segments": ["../../etc"]}'
            )
            and None
        ),
        r"MANIFEST.json: segments\[0\]: must be a name like",
    ),
    "bank cut": (
        "megatron_bank",
        cut(20, "tokens.bin"),
        r"ledger.log:1: tok.bytes: must be in \[0, 20\], the size of tokens.bin, got 36",
    ),
    "bank offset": (
        "megatron_bank",
        ledger(put(0, "lp", "offset", 10**12)),
        r"ledger.log:1: lp.offset: must be in \[0, 10\], the size of logprobs.bin, got 1000000000000",
    ),
    "bank negative": ("megatron_bank", ledger(put(0, "lp", "offset", -2)), r"ledger.log:1: lp.offset: must be in"),
    "bank changed": ("megatron_bank", ledger(put(0, "uid", "x")), r"ledger.log:1: checksum: does not fit"),
    "bank bytes": (
        "megatron_bank",
        lambda path: next(path.rglob("tokens.bin")).write_bytes(bytes(36)) and None,
        r"ledger.log:1: checksum: does not fit",
    ),
    "bank version": ("megatron_bank", ledger(put(0, "format_version", 1)), r":1: format_version: must be 2, got 1"),
    "bank text": ("megatron_bank", ledger(put(0, "kind", "inline")), r":1: kind: must be 'token', got 'inline'"),
    "bank segment": (
        "megatron_bank",
        lambda path: shutil.rmtree(path / "generations"),
        r"gen-000003/ledger.log: cannot read it",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_dump_is_named_by_file_place_and_field(tmp_path, damage):
    name, apply, message = DAMAGE[damage]
    path = dumps.WRITERS[name](tmp_path)
    apply(path)
    with pytest.raises(RolloutError, match=message):
        read_dump(path)


def test_records_of_a_bank_may_not_share_bytes(tmp_path):
    bank = dumps.write_bank(tmp_path / "bank")
    file = next(bank.rglob("ledger.log"))
    record = json.loads(file.read_text())
    slices = [next(bank.rglob(name)).read_bytes() for name in ("tokens.bin", "logprobs.bin", "masks.bin")]
    again = {**record, "uid": "gen-000003/1"}
    dumps.write_lines(file, [record, {**again, "checksum": dumps.bank_checksum(again, slices)}])
    with pytest.raises(RolloutError, match=r"ledger.log:2: tok: records claim 72 bytes of tokens.bin up to here"):
        read_dump(bank)


def test_a_list_that_a_torch_file_refers_to_again_and_again_is_not_multiplied(tmp_path):
    shared = list(range(2000))
    sample = dumps.slime_rollout()["samples"][0] | {"tokens": shared, "rollout_top_p_token_offsets": None}
    samples = [{**sample, "index": number} for number in range(2000)]
    path = dumps.save(tmp_path / "a.pt", {"samples": samples})
    with pytest.raises(RolloutError, match=r"tokens: more in all, with kept sets, than the file has bytes"):
        read_dump(path)


def test_a_format_that_is_named_must_be_the_files(tmp_path):
    path = dumps.WRITERS["slime"](tmp_path)
    with pytest.raises(RolloutError, match="not of format skyrl; leave --from out"):
        read_dump(path, format="skyrl")
    with pytest.raises(RolloutError, match="format must be one of jsonl, parquet, nemo_rl"):
        read_dump(path, format="verl")
    unknown = tmp_path / "a.txt"
    unknown.write_text("text")
    with pytest.raises(RolloutError, match=r"a.txt: of no known format; name it with --from"):
        read_dump(unknown)
    with pytest.raises(RolloutError, match=r"nothing\.jsonl: no such file or folder"):
        read_dump(tmp_path / "nothing.jsonl")
    for name in FORMATS:
        with pytest.raises(RolloutError, match=r"a\.txt"):
            read_dump(unknown, format=name)


def test_our_own_files_are_read_as_they_are(tmp_path):
    write_rollouts(tmp_path / "a.parquet", make_rollouts([3, 4]))
    dump = read_dump(tmp_path / "a.parquet")
    assert_same(dump.rollouts, make_rollouts([3, 4]))
    assert dump.notes == () and dump.format == "parquet"
