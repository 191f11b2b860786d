"""``megatron-support convert``, and dumps as the rollouts of a recipe."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from megatron_support.__main__ import main
from megatron_support.config.recipe import RolloutFormat
from megatron_support.errors import RolloutError
from megatron_support.rollouts import read_rollouts, write_rollouts
from megatron_support.rollouts.readers import FORMATS, read_dump
from tests import dumps
from tests.command_line import command
from tests.ranks import run_ranks
from tests.rollout_batch import assert_same, make_rollouts


@pytest.mark.parametrize("name", dumps.WRITERS)
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_every_dump_is_converted_and_what_it_lost_is_printed(tmp_path, capsys, name, ending):
    source, target = dumps.WRITERS[name](tmp_path), tmp_path / f"out.{ending}"
    assert main(["convert", str(source), str(target)]) == 0
    dump = read_dump(source)
    assert_same(read_rollouts(target), dump.rollouts)
    first, *notes = capsys.readouterr().out.splitlines()
    assert first == f"{target}: 2 sequences, 5 response tokens, from {dump.format}"
    assert notes == [f"  {note}" for note in dump.notes] and any("sampling" in note for note in notes)


def test_what_the_user_knows_goes_into_the_file(tmp_path, capsys):
    source, target = dumps.WRITERS["nemo_rl"](tmp_path), tmp_path / "out.parquet"
    assert main(["convert", str(source), str(target), "--from", "nemo_rl", "--top-p", "0.9", "--top-k", "40"]) == 0
    rollouts: Any = read_rollouts(target)
    assert rollouts.temperature.tolist() == [1.0, 1.0] and rollouts.top_k.tolist() == [40, 40]
    assert rollouts.unknown_fields == {"prev_logprobs"}
    assert "sampling" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.csv"], "out.csv: the name must end in .jsonl or .parquet, got '.csv'; convert or rename it"),
        (["train_data_step3.jsonl"], "train_data_step3.jsonl: OUT must be another file than IN"),
        (["missing/out.jsonl"], "missing/out.jsonl: cannot write rollouts"),
        (["out.jsonl", "--from", "verl"], "format must be one of jsonl, parquet, nemo_rl"),
        (["out.jsonl", "--from", "prime_rl"], "train_data_step3.jsonl:1: schema_version: required and missing"),
        (["out.jsonl", "--top-p", "2"], "train_data_step3.jsonl:1: sampling.top_p: must be in (0, 1], got 2.0"),
        (["out.jsonl", "--temperature", "nan"], "train_data_step3.jsonl:1: sampling.temperature: must be > 0"),
        (
            ["out.jsonl", "--vocab-size", "12"],
            "token_ids, read as tokens[1]: must be in the vocabulary [0, 12), got 12",
        ),
    ],
)
def test_what_cannot_be_converted_is_said_and_nothing_is_written(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    source = dumps.WRITERS["nemo_rl"](tmp_path)
    before = source.read_bytes()
    assert main(["convert", source.name, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert source.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [source.name]


def test_inspect_lists_what_is_unknown(tmp_path, capsys):
    target = tmp_path / "out.parquet"
    assert main(["convert", str(dumps.WRITERS["skyrl"](tmp_path)), str(target), "--top-p", "0.9"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(target)]) == 0
    assert "2 rows   rewards is unknown: the program that wrote the rollouts had lost it" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.pt", "a"])
def test_a_pipe_does_not_block(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(RolloutError, match=f"{name}: must be a regular file"):
        read_dump(tmp_path / name)


def test_a_link_to_itself_is_a_message(tmp_path, capsys):
    (tmp_path / "a.jsonl").symlink_to("a.jsonl")
    (tmp_path / "out.jsonl").touch()
    assert main(["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "out.jsonl")]) == 2
    assert "a.jsonl: no such file or folder" in capsys.readouterr().err


def test_the_schema_names_the_formats_that_there_are():
    assert get_args(RolloutFormat) == tuple(FORMATS)


def recipe(folder: Path, paths: list[str], **rollouts: Any) -> str:
    """A recipe for a tiny model that reads rollouts from files of its folder."""
    tree = {
        "name": "dump",
        "device": "cpu",
        "model": {
            "architecture": {
                "vocab_size": 32,
                "num_layers": 1,
                "hidden_size": 16,
                "num_attention_heads": 2,
                "ffn_hidden_size": 32,
            },
            "dtype": "float32",
        },
        "optimizer": {"lr": 1e-3},
        "rollouts": {"type": "files", "paths": paths, "sequences_per_step": 2, **rollouts},
        "train": {"steps": 1, "microbatch": {"max_tokens": 64}},
        "logging": {"run_dir": str(folder / "runs"), "progress": "off"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


SAMPLING = {"temperature": 1.0, "top_p": 0.9}


def test_a_recipe_reads_a_dump_and_says_what_it_lost(tmp_path, capsys):
    source = dumps.WRITERS["nemo_rl"](tmp_path)
    assert main(["validate", recipe(tmp_path, [source.name], sampling=SAMPLING)]) == 0
    output = capsys.readouterr().out
    assert "2 sequences, 5 response tokens" in output
    assert f"{source}: prev_logprobs: which tokens were outside the support is lost" in output


def test_a_recipe_trains_on_a_dump(tmp_path):
    source = dumps.WRITERS["slime_train"](tmp_path)
    arguments = ["train", recipe(tmp_path, [source.name], sampling=SAMPLING, format="slime")]
    ((code, _, shown),) = run_ranks(1, command, tmp_path, arguments)  # no rank could be forked from here afterwards
    assert code == 0, shown
    (written,) = tmp_path.glob("runs/*/rollouts*")
    rollouts = read_rollouts(written)
    assert rollouts.sample_ids == ("40", "41") and not rollouts.unknown_fields


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("nemo_rl", {}, "sampling must be known to train with grpo advantages, and the files do not say it; give roll"),
        ("skyrl", {"sampling": SAMPLING}, "rewards must be known to train with grpo advantages"),
    ],
)
def test_training_does_not_read_what_the_dump_does_not_say(tmp_path, capsys, name, fields, message):
    source = dumps.WRITERS[name](tmp_path)
    assert main(["validate", recipe(tmp_path, [source.name], **fields)]) == 2
    assert f"rollouts.paths: {message}" in capsys.readouterr().err


def test_a_damaged_dump_stops_a_recipe(tmp_path, capsys):
    rows = dumps.nemo_rl_rows()
    rows[1]["token_ids"][0][3] = 32
    source = dumps.write_lines(tmp_path / "train_data_step3.jsonl", rows)
    assert main(["validate", recipe(tmp_path, [source.name], sampling=SAMPLING)]) == 2
    assert "step3.jsonl:2: token_ids, read as tokens[3]: must be in the vocabulary [0, 32)" in capsys.readouterr().err


class RunsCode:
    """Unpickling it runs a shell command."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return (os.system, (self._command,))


def hostile_pickle(marker: Path) -> bytes:
    return pickle.dumps(RunsCode(f"touch {marker}"))


def torch_file(folder: Path, marker: Path) -> Path:
    path = folder / "a.pt"
    torch.save({"samples": [RunsCode(f"touch {marker}")]}, path)
    return path


def bare_pickle(folder: Path, marker: Path) -> Path:
    path = folder / "a.pt"
    path.write_bytes(hostile_pickle(marker))
    return path


def parquet_with_pickled_types(folder: Path, marker: Path) -> Path:
    """Extension types as old pyarrow wrote its Python ones (CVE-2023-47248), and pickles under pandas' keys."""
    path = folder / "a.parquet"
    write_rollouts(path, make_rollouts([3, 4]))
    table = pq.read_table(path)
    types = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": hostile_pickle(marker),
    }
    fields = [field.with_metadata(types) for field in table.schema]
    metadata = {b"pandas": hostile_pickle(marker), b"PythonObject": hostile_pickle(marker)}
    pq.write_table(table.cast(pa.schema(fields, metadata=metadata)), path)
    return path


HOSTILE: dict[str, tuple[Callable[[Path, Path], Path], str | None]] = {
    "torch file": (torch_file, "neither a plain value nor a tensor"),
    "bare pickle": (bare_pickle, "a pickle, which can run anything"),
    "Parquet": (parquet_with_pickled_types, None),
}


def test_the_hostile_files_are_hostile(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(hostile_pickle(marker))
    assert marker.exists()
    marker.unlink()
    torch.load(torch_file(tmp_path, marker), weights_only=False)
    assert marker.exists()
    schema = pq.ParquetFile(parquet_with_pickled_types(tmp_path, marker)).schema_arrow
    assert any(b"touch" in value for field in schema for value in (field.metadata or {}).values()), schema


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_in_a_file_runs(tmp_path, capsys, name):
    write, message = HOSTILE[name]
    marker, target = tmp_path / "marker", tmp_path / "out.jsonl"
    source = write(tmp_path, marker)
    for arguments in (["convert", str(source), str(target)], ["inspect", str(source)]):
        code = main(arguments)
        assert not marker.exists()
        shown = capsys.readouterr().err
        if message is None:  # the metadata is passed over, the numbers are read
            assert code == 0, shown
        else:
            assert code == 2 and shown.startswith("error: "), shown
            assert message in shown or arguments[0] == "inspect"
    assert target.exists() == (message is None)
