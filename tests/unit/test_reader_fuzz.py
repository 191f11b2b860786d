"""Hostile and damaged input: every reader answers with a message that names the file, or with what the file holds.

Never a crash, a hang, memory that a claim asks for, code of the file, or a damaged value taken for a sound one.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import multiprocessing
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_support.config import load_recipe
from megatron_support.errors import ConfigurationError, RolloutError
from megatron_support.rollouts import RolloutBatch, read_rollouts, write_rollouts
from megatron_support.rollouts.readers import Assumptions, Dump, read_dump
from tests import dumps
from tests.rollout_batch import assert_same, make_rollouts

CORPUS = Path(__file__).parents[1] / "data/reader_corpus"
RECIPE = Path(__file__).parents[2] / "configs/quickstart.yaml"
FUZZ = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def ours(folder: Path, ending: str) -> Path:
    path = folder / f"rollouts.{ending}"
    write_rollouts(path, make_rollouts([3, 2], support=True))
    return path


WRITERS = {
    **dumps.WRITERS,
    "jsonl": lambda folder: ours(folder, "jsonl"),
    "parquet": lambda folder: ours(folder, "parquet"),
}
CHECKSUMMED = ("slime", "slime_train", "skyrl", "megatron_bank")
PLACE = {
    "slime": r":sample \d+: [a-z_]+",
    "slime_train": r":sample \d+: [a-z_]+",
    "skyrl": r":row \d+: [a-z_]+",
    "parquet": r":row \d+: [a-z_]+",
}
"""Where a field is named; ``:line: field`` elsewhere."""


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder of one example: hypothesis runs many in one test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def outcome(path: Path, **options: Any) -> Dump | str:
    """What a reader gives, or its message, which begins with the file or one inside the folder."""
    try:
        return read_dump(path, **options)
    except RolloutError as error:
        assert str(error).startswith(str(path)), error
        return str(error)


def check_sound(rollouts: RolloutBatch, path: Path) -> None:
    """What was accepted can be trained on, and be written and read again."""
    mask = rollouts.response_mask
    assert rollouts.generation_logprobs is not None
    generation = rollouts.generation_logprobs[mask]
    outside = generation == -math.inf
    assert bool((generation.isfinite() | outside).all()) and bool((generation[~outside] <= 1e-4).all())
    assert not bool(outside.any()) or bool(rollouts.filtering[rollouts.sequence_ids[mask]][outside].all())
    assert bool(rollouts.rewards.isfinite().all()) and bool((rollouts.tokens >= 0).all())
    assert len(set(rollouts.sample_ids)) == rollouts.num_sequences
    for ending in ("jsonl", "parquet"):
        copied = path.parent / f"copied.{ending}"
        write_rollouts(copied, rollouts)
        assert_same(read_rollouts(copied), rollouts)


MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "cut", "repeat"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def mutate(content: bytes, mutations: list[tuple[str, float, bytes]]) -> bytes:
    for kind, where, material in mutations:
        at = int(where * len(content))
        if kind == "flip":
            content = (
                content[:at]
                + bytes(a ^ b for a, b in zip(content[at : at + len(material)], material, strict=False))
                + content[at + len(material) :]
            )
        elif kind == "insert":
            content = content[:at] + material + content[at:]
        elif kind == "delete":
            content = content[:at] + content[at + len(material) :]
        elif kind == "cut":
            content = content[:at]
        else:
            content = content[:at] + content[at : at + 64] + content[at:]
    return content


@pytest.mark.parametrize("name", WRITERS)
@FUZZ
@given(mutations=MUTATIONS, choice=st.integers(0, 4))
def test_bytes_of_real_files_may_be_anything(name, mutations, choice):
    with folder() as place:
        path = WRITERS[name](place)
        sound = read_dump(path).rollouts
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        file = files[choice % len(files)]
        file.write_bytes(mutate(file.read_bytes(), mutations))
        result = outcome(path)
        if isinstance(result, str):
            return
        if name in CHECKSUMMED:
            assert_same(result.rollouts, sound)
        check_sound(result.rollouts, path)


DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
ODD = st.sampled_from(
    [
        *(None, True, False, "", "1", "\ud800", "\x00", b"bytes", {}, [], [[]], DEEP, {"tokens": []}),
        *(math.nan, math.inf, -math.inf, -0.0, 1e308, -1e308, 0.5, -1, 0, 1, 2, 10**12, -(10**12), 2**63, 10**400),
    ]
)


def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from entries(inner, (*path, key))


def plain_content(name: str) -> Any:
    """What a dump holds, tensors as lists."""
    content = dumps.slime_rollout() if name == "slime" else dumps.slime_train()
    return {
        **content,
        "samples": [
            {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in sample.items()}
            for sample in content["samples"]
        ],
    }


ROWS: dict[str, Any] = {
    "nemo_rl": dumps.nemo_rl_rows,
    "prime_rl": dumps.prime_rl_rows,
    "slime": lambda: plain_content("slime"),
    "slime_train": lambda: plain_content("slime_train"),
    "jsonl": lambda: our_rows(),
    "megatron_bank": lambda: ledger_records(),
}


def our_rows() -> list[dict[str, Any]]:
    with folder() as place:
        return [json.loads(line) for line in ours(place, "jsonl").read_text().splitlines()]


def ledger_records() -> list[dict[str, Any]]:
    with folder() as place:
        file = next(dumps.write_bank(place / "bank").rglob("ledger.log"))
        return [json.loads(line) for line in file.read_text().splitlines()]


def write_rows(name: str, rows: Any, place: Path) -> Path:
    """The rows as a dump; a bank's checksums are those of its records, whatever they say."""
    if name in ("slime", "slime_train"):
        return dumps.save(place / "a.pt", rows)
    if name == "megatron_bank":
        bank = dumps.write_bank(place / "bank")
        for record in rows:
            if isinstance(record, dict):
                slices = [read_slice(bank, record.get(key), file) for key, file in SIDECARS]
                record["checksum"] = dumps.bank_checksum(record, slices)
        dumps.write_lines(next(bank.rglob("ledger.log")), rows)
        return bank
    return dumps.write_lines(place / "a.jsonl", rows)


SIDECARS = (("tok", "tokens.bin"), ("lp", "logprobs.bin"), ("mask", "masks.bin"))


def read_slice(bank: Path, place: Any, file: str) -> bytes:
    """What a record claims, as far as it is there."""
    try:
        content = next(bank.rglob(file)).read_bytes()
        return content[place["offset"] : place["offset"] + place["bytes"]] if place["offset"] >= 0 else b""
    except (TypeError, KeyError, IndexError):
        return b""


def put(rows: Any, path: tuple[Any, ...], value: Any) -> None:
    *outer, last = path
    for key in outer:
        rows = rows[key]
    rows[last] = value


@pytest.mark.parametrize("name", ROWS)
@FUZZ
@given(data=st.data())
def test_values_may_be_of_any_type_and_size(name, data):
    rows = ROWS[name]()
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(entries(rows))))
        value = data.draw(ODD)
        if name not in ("slime", "slime_train") and isinstance(value, bytes):
            value = "bytes"
        put(rows, path, copy.deepcopy(value))
    options = data.draw(st.sampled_from([{}, {"sampling": {"top_p": 0.5, "temperature": 1.0}}, {"nonfinite": "mask"}]))
    with folder() as place:
        path = write_rows(name, rows, place)
        if name == "jsonl" and "sampling" in options:
            options = {}
        result = outcome(path, assumptions=Assumptions(**options))
        if not isinstance(result, str):
            check_sound(result.rollouts, path)


READ = {
    "nemo_rl": ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs", "advantages"),
    "prime_rl": ("token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs", "advantages", "entropy"),
    "slime": ("tokens", "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    "slime_train": ("tokens", "loss_masks", "rollout_log_probs", "log_probs", "advantages"),
    "jsonl": ("tokens", "response_mask", "generation_logprobs", "prev_logprobs", "reference_logprobs", "values"),
}


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in READ.items() for field in fields])
@pytest.mark.parametrize(
    "value", [{"a": 1}, "x", math.nan, 10**400, [0]], ids=["object", "text", "nan", "huge", "list"]
)
def test_an_entry_that_training_reads_is_never_taken_for_another(tmp_path, name, field, value):
    """The last response token's entry: file, place, field and entry are named."""
    rows = ROWS[name]()
    row = rows["samples"][0] if isinstance(rows, dict) else rows[0]
    values = row[field][0] if name == "nemo_rl" else row[field]
    values[-1] = value
    message = outcome(write_rows(name, rows, tmp_path))
    assert isinstance(message, str)
    assert re.search(PLACE.get(name, r":\d+: [a-z_]+"), message) and field in message, message


CLAIMS = [10**12, 2**31, 2**63 - 1, -1, -(10**12)]


@pytest.mark.parametrize("name", ROWS)
def test_a_claimed_size_reserves_nothing(tmp_path, name):
    """Every integer of a dump says 10^12 or worse, in a process that may take half a gigabyte more."""
    process = multiprocessing.get_context("fork").Process(target=_read_claims, args=(name, tmp_path))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


def _read_claims(name: str, place: Path) -> None:
    limit_memory()
    for number, path in enumerate(entries(ROWS[name]())):
        rows = ROWS[name]()
        *outer, last = path
        value = rows
        for key in outer:
            value = value[key]
        if type(value[last]) is not int:
            continue
        for claim in CLAIMS:
            put(rows, path, claim)
            own = place / f"{number}"
            own.mkdir(exist_ok=True)
            outcome(write_rows(name, rows, own))


def limit_memory() -> None:
    """At most half a gigabyte more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**29
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


COLUMN = st.one_of(
    st.lists(st.lists(st.integers(-2, 60), max_size=4), min_size=2, max_size=2),
    st.lists(st.lists(st.one_of(st.none(), st.floats()), max_size=4), min_size=2, max_size=2),
    st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=2, max_size=2),
    st.lists(st.binary(max_size=3), min_size=2, max_size=2),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.lists(st.datetimes(), min_size=2, max_size=2),
    st.lists(
        st.decimals(allow_nan=False, allow_infinity=False, places=2, max_value=99, min_value=0), min_size=2, max_size=2
    ),
    st.lists(st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 9), max_size=2)}), min_size=2, max_size=2),
)


@FUZZ
@given(data=st.data())
def test_columns_of_a_parquet_file_may_be_of_any_type(data):
    table = pa.Table.from_pylist(our_rows())
    for name in data.draw(st.lists(st.sampled_from(table.column_names), min_size=1, max_size=2, unique=True)):
        column = pa.array(data.draw(COLUMN))
        table = table.set_column(table.column_names.index(name), name, column)
    with folder() as place:
        path = place / "a.parquet"
        pq.write_table(table, path)
        result = outcome(path)
        if not isinstance(result, str):
            check_sound(result.rollouts, path)


EXPECTED = json.loads((CORPUS / "expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_the_corpus_is_answered_by_the_message_it_calls_for(name):
    """Files that once broke a reader or stand for a kind of damage."""
    process = multiprocessing.get_context("fork").Process(target=_read_corpus, args=(name,))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode == 0


def _read_corpus(name: str) -> None:
    limit_memory()
    path = CORPUS / name
    if path.suffix == ".yaml":
        with pytest.raises(ConfigurationError) as caught:
            load_recipe(path)
        message = str(caught.value)
    else:
        message = outcome(path)
    assert isinstance(message, str) and message.startswith(str(path)) and EXPECTED[name] in message, message


def test_every_file_of_the_corpus_is_expected():
    assert {path.name for path in CORPUS.iterdir()} == {*EXPECTED, "expected.json"}


def test_no_message_advises_to_unpickle():
    for name in EXPECTED:
        if name.endswith(".pt"):
            message = outcome(CORPUS / name)
            assert isinstance(message, str) and "`weights_only` to" not in message and "False" not in message


def test_a_recipe_is_small(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"# {'x' * 2**18}\nname: x\n")
    with pytest.raises(ConfigurationError, match=r"r\.yaml: not a valid recipe: must have at most 262144 bytes"):
        load_recipe(path)


@FUZZ
@given(mutations=MUTATIONS)
def test_a_recipe_may_be_any_bytes(mutations):
    with folder() as place:
        path = place / "r.yaml"
        path.write_bytes(mutate(RECIPE.read_bytes(), mutations))
        with contextlib.suppress(ConfigurationError):
            load_recipe(path)


YAML_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            ["${name}", "${a.b}", "${", "${oc.env:NOTHING}", "???", "{{x}}", "1:2:3", "0x1f", "*a", "&a 1"]
        ),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)


@FUZZ
@given(data=st.data())
def test_fields_of_a_recipe_may_be_anything(data):
    import yaml

    tree = yaml.safe_load(RECIPE.read_text())
    put(tree, data.draw(st.sampled_from(list(entries(tree)))), data.draw(YAML_VALUES))
    with folder() as place:
        path = place / "r.yaml"
        path.write_text(yaml.safe_dump(tree))
        with contextlib.suppress(ConfigurationError):
            load_recipe(path)
