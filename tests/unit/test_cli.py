"""The command line on recipes that are wrong in themselves: one message, exit code 2, nothing written."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_support.__main__ import _parse, main
from megatron_support.commands.common import write_page
from megatron_support.errors import ConfigurationError

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
    "folder in the name": (GOOD, ["name=a/b"], ["name: must be letters, digits", "got 'a/b'", "change it"]),
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
        ["model.architecture.hidden_size: must be less than or equal to 2147483647", f"got {2**70}"],
    ),
    "two at once": (GOOD, ["train.steps=0", "optimizer.lr=-1"], ["2 errors", "train.steps:", "optimizer.lr:"]),
}


@pytest.mark.parametrize(
    "arguments",
    [["validate", "{}"], ["convert", "{}", "out.parquet"], ["inspect", "{}"], ["replay", "{}"], ["report", "{}"]],
    ids=lambda arguments: arguments[0],
)
def test_paths_that_no_system_takes(arguments, capsys):
    for path in ("a" * 5000, "a\0b", "a" * 5000 + ".jsonl", "a\0b.parquet"):
        assert main([argument.format(path) for argument in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_a_page_goes_to_a_file_and_nowhere_else(tmp_path):
    """Opening a pipe that nobody reads would wait for ever."""
    pipe = tmp_path / "pipe.html"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path):
        with pytest.raises(ConfigurationError, match="--html must be a file that can be written"):
            write_page(target, "<html></html>", "--html")


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
