"""The command line on recipes that are wrong in themselves: one message, exit code 2, nothing written."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_support.__main__ import _parse, main
from tests import no_files

ROOT = Path(__file__).parents[2]

GOOD = {
    "name": "run",
    "device": "cpu",
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
    "train": {"steps": 1, "microbatch": {"max_tokens": 64}},
}


def without(tree: dict, *path: str) -> dict:
    """A copy of a nested mapping without one entry."""
    head, *rest = path
    return {key: without(value, *rest) if key == head else value for key, value in tree.items() if rest or key != head}


@pytest.fixture(autouse=True)
def _loggers_as_they_were():
    """The command line silences libraries; later tests of the same process want to hear them."""
    loggers = [logging.getLogger(name) for name in ("torch", "megatron")]
    levels = [logger.level for logger in loggers]
    yield
    logging.disable(logging.NOTSET)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(tree) -> str:
        (tmp_path / "recipe.yaml").write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return "recipe.yaml"

    return write


# recipe, arguments, parts of the message
BAD = {
    "missing field": (
        without(GOOD, "optimizer", "lr"),
        [],
        ["recipe.yaml: 1 error", "optimizer.lr: required and missing; add it"],
    ),
    "misspelt field": (GOOD, ["train.minibatchs=2"], ["train.minibatchs: unknown field; did you mean 'minibatches'?"]),
    "misspelt type": (GOOD, ["rollouts.type=smpler"], ["unknown type, got 'smpler'; did you mean 'sampler'?"]),
    "wrong type": (GOOD, ["train.steps=many"], ["train.steps: must be", "got 'many'"]),
    "out of range": (GOOD, ["rollouts.sampling.top_p=1.5"], ["rollouts.sampling.top_p: must be", "got 1.5"]),
    "folder in the name": (GOOD, ["name=a/b"], ["name: must be at most 200 letters, digits", "got 'a/b'", "change it"]),
    "group of one": (GOOD, ["rollouts.samples_per_prompt=1"], ["samples_per_prompt must be >= 2", "got 1", "raise it"]),
    "too many minibatches": (
        GOOD,
        ["train.minibatches=5"],
        ["train.minibatches must be <= the 4 sequences", "got 5", "lower it"],
    ),
    "override without a value": (
        GOOD,
        ["train.steps"],
        ["override 'train.steps' must look like field.subfield=value", "add '='"],
    ),
    "override through a number": (GOOD, ["seed.sub=1"], ["recipe.yaml"]),
    "not a mapping": ("- 1\n- 2\n", [], ["recipe.yaml", "a recipe is a mapping of fields"]),
    "not YAML": ("a: [1\n", [], ["recipe.yaml", "not a valid recipe"]),
    "a reference to nowhere": (GOOD, ["seed='${nowhere}'"], ["recipe.yaml", "nowhere"]),
    "a size beyond any machine": (
        GOOD,
        [f"model.architecture.hidden_size={2**70}"],
        ["model.architecture.hidden_size: must be less than or equal to 1048576", f"got {2**70}"],
    ),
    "steps beyond any run": (GOOD, [f"train.steps={2**31}"], ["train.steps: must be less than or equal to 2147483647"]),
    "two at once": (GOOD, ["train.steps=0", "optimizer.lr=-1"], ["2 errors", "train.steps:", "optimizer.lr:"]),
}


@pytest.mark.parametrize("command", ["train", "validate"])
@pytest.mark.parametrize("case", BAD)
def test_bad_recipes(case, command, write, capsys, tmp_path):
    tree, overrides, parts = BAD[case]
    assert main([command, write(tree), *overrides]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and "Traceback" not in shown.err
    for part in parts:
        assert part in shown.err, shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_recipe_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nowhere.yaml"]) == 2
    message = capsys.readouterr().err
    assert "nowhere.yaml: cannot read the recipe" in message and "give the path of a YAML file" in message


def test_other_ranks_say_nothing(write, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", write(GOOD), "train.steps=0"]) == 2
    assert capsys.readouterr() == ("", "")


def test_tasks_are_listed(capsys):
    assert main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["addition", "sort", "swap"]
    assert "3+4= -> 7" in lines[0]


@pytest.mark.parametrize(("command", "missing"), [("train", "RECIPE"), ("replay", "FILE")])
def test_a_missing_file_is_asked_for_and_nothing_else(command, missing, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {missing}\n")


def test_no_command_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "usage: megatron-support" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "cannot read the recipe"),
        (["train", "configs/quickstart.yaml"], "must divide the number of ranks, got 1"),
        (["train", "configs/quickstart.yaml", "--ranks", "3"], "must divide the number of ranks, got 3"),
        (["train", "configs/quickstart.yaml", "--ranks", "3", "parallel.tensor=3"], "num_attention_heads 4, got 3"),
        (["score", "x.jsonl", "configs/quickstart.yaml", "--output", "y.jsonl"], "the number of ranks, got 1"),
        (["validate", "configs/quickstart.yaml", "--ranks", "3"], "must divide the number of ranks, got 3"),
        (["export", "configs", "out"], "configs: must be a checkpoint, or a run folder with one"),
    ],
)
def test_what_needs_no_model_is_refused_before_anything_slow_is_imported(arguments, message):
    program = (
        f"import sys; from megatron_support.__main__ import main; code = main({arguments!r});"
        "sys.exit(99 if {'torch', 'megatron.core'} & set(sys.modules) else code)"
    )
    alone = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_name_their_own_file(path):
    from megatron_support.config import load_recipe

    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize(
    "arrangement", ["{recipe} --ranks 2 {override}", "{recipe} {override} --ranks 2", "--ranks 2 {recipe} {override}"]
)
def test_overrides_may_stand_on_either_side_of_options(write, arrangement):
    line = arrangement.format(recipe=write(GOOD), override="train.steps=7 optimizer.lr=0.5")
    options = _parse(["train", *line.split()])
    assert options.ranks == 2 and options.overrides == ["train.steps=7", "optimizer.lr=0.5"]


@pytest.mark.parametrize("arguments", [["doctor", "train.steps=7"], ["train", "r.yaml", "--rank", "x"], ["train"]])
def test_what_is_no_override_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(arguments)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


UNUSABLE = {
    "a NUL character": ("a\0b", "without NUL characters, got 'a\\x00b"),
    "a long name": ("x" * 5000 + "", "of at most 3583 bytes, got 5"),
    "many folders": ("folder/" * 700 + "x", "of at most 3583 bytes, got "),
    "one long name": ("runs/" + "x" * 300 + "", "names of at most 255 bytes, got one of 30"),
    "half a character": ("a\ud800", "must be a path in UTF-8, got 'a\\ud800"),
}
# arguments before and after the path, and what the message calls it
PLACES = {
    "convert": (["convert", "{}.jsonl", "out.jsonl"], "IN"),
    "convert to": (["convert", "in.jsonl", "{}.jsonl"], "OUT"),
    "inspect": (["inspect", "{}.jsonl"], "FILE"),
    "inspect --html": (["inspect", "in.jsonl", "--html", "{}.html"], "--html"),
    "inspect --recipe": (["inspect", "in.jsonl", "--html", "out.html", "--recipe", "{}"], "RECIPE"),
    "replay": (["replay", "{}"], "FILE"),
    "replay --recipe": (["replay", "in.jsonl", "--recipe", "{}"], "RECIPE"),
    "replay --compare": (["replay", "in.jsonl", "--compare", "{}"], "RECIPE"),
    "validate": (["validate", "{}"], "RECIPE"),
    "train": (["train", "{}", "seed=2"], "RECIPE"),
    "train --ranks": (["train", "{}", "--ranks", "2"], "RECIPE"),
    "score": (["score", "{}.jsonl", "recipe.yaml", "--output", "out.jsonl"], "FILE"),
    "score with": (["score", "in.jsonl", "{}", "--output", "out.jsonl"], "RECIPE"),
    "score --output": (["score", "in.jsonl", "recipe.yaml", "--output", "{}.jsonl"], "--output"),
    "report": (["report", "{}"], "RUN"),
    "report --out": (["report", "run", "--out", "{}"], "--out"),
    "export": (["export", "{}", "out"], "RUN"),
    "export to": (["export", "run", "{}"], "OUT"),
    "check --recipe": (["check", "--recipe", "{}"], "RECIPE"),
    "check --json": (["check", "--json", "{}"], "--json"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_path_that_no_file_can_have(case, place, write, capsys, tmp_path):
    path, part = UNUSABLE[case]
    arguments, name = PLACES[place]
    write(GOOD)
    shutil.copy(ROOT / "examples/data/swap_values.jsonl", "in.jsonl")
    before = sorted(tmp_path.iterdir())
    assert main([argument.format(path) for argument in arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {name} must be a path ") and part in shown, shown
    assert shown.count("\n") == 1 and len(shown) < 300
    assert sorted(tmp_path.iterdir()) == before


FIELDS = {
    "rollouts.paths.0": {"rollouts": {"type": "files", "paths": ["{}"], "sequences_per_step": 2}},
    "model.weights.path": {"model": {"weights": {"type": "huggingface", "path": "{}"}}},
    "reference.checkpoint.path": {"reference": {"checkpoint": {"type": "gguf", "path": "{}"}}},
    "checkpoint.resume": {"checkpoint": {"resume": "{}"}},
    "logging.run_dir": {"logging": {"run_dir": "{}"}},
    "may_read.0": {"may_read": ["{}"]},
    "defaults": {"defaults": ["{}"]},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("case", [case for case in UNUSABLE if case != "half a character"])  # YAML cannot say that
def test_a_field_with_a_path_that_no_file_can_have(case, field, write, capsys):
    path, part = UNUSABLE[case]
    text = json.dumps({**GOOD, **FIELDS[field]}).replace("{}", json.dumps(path)[1:-1])
    assert main(["train", write(text)]) == 2
    shown = capsys.readouterr().err
    assert f"{field}: must be a path " in shown and part in shown, shown


TARGETS = {
    "report": ["report", "run", "--out", "{}"],
    "inspect": ["inspect", "in.jsonl", "--html", "{}"],
    "convert to lines": ["convert", "in.jsonl", "{}.jsonl"],
    "convert to Parquet": ["convert", "in.jsonl", "{}.parquet"],
}


@pytest.mark.parametrize("command", TARGETS)
def test_what_is_no_file_is_not_written_to(command, write, capsys, tmp_path):
    write(GOOD)
    shutil.copy(ROOT / "examples/data/swap_values.jsonl", "in.jsonl")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    arguments = [argument.format("target") for argument in TARGETS[command]]
    (name,) = [argument for argument in arguments if argument.startswith("target")]
    for kind in no_files.KINDS:
        with no_files.standing(tmp_path / name, kind):
            assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and name in line and "what is there is no regular file" in line


def test_a_name_too_long_for_a_folder(write, capsys):
    assert main(["train", write({**GOOD, "name": "x" * 201})]) == 2
    assert "name: must be at most 200 letters, digits, " in capsys.readouterr().err


@pytest.mark.parametrize("field", ["rollouts.paths.0", "defaults"])
def test_a_path_too_long_from_the_folder_of_its_recipe(field, write, capsys, tmp_path):
    part = "f" * 200 + "/"
    folder = tmp_path / (part * 9)
    folder.mkdir(parents=True)
    text = json.dumps({**GOOD, **FIELDS[field]}).replace("{}", part * 9 + "x")
    (folder / "recipe.yaml").write_text(text)
    write(GOOD)
    assert main(["train", str(folder / "recipe.yaml")]) == 2
    shown = capsys.readouterr().err
    assert f"{field}: must be a path of at most 3583 bytes, got 3" in shown, shown[-300:]
