"""Which files a recipe may name, and that nothing it names is imported or run."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_support.config import load_recipe
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.weights.gguf import resolve_path
from tests.unit.test_config import FILES, changed

PACKAGE = Path(__file__).parents[2] / "megatron_support"
CONFIGS = PACKAGE.parent / "configs"


def write(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def rollouts(*paths: str) -> dict[str, Any]:
    return {**FILES, "paths": list(paths)}


WEIGHTS = {"type": "huggingface", "path": "../weights"}
NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "absolute": ({"rollouts": rollouts("/elsewhere/a.jsonl")}, "rollouts.paths.0: .* '/elsewhere/a.jsonl'"),
    "second": ({"rollouts": rollouts("a.jsonl", "../b.jsonl")}, r"rollouts.paths.1: .*/b.jsonl'"),
    "through a folder": ({"rollouts": rollouts("data/../../b.jsonl")}, "rollouts.paths.0"),
    "beside": ({"rollouts": rollouts("../recipes-and-more/b.jsonl")}, "rollouts.paths.0"),
    "home": ({"rollouts": rollouts("~/b.jsonl")}, "rollouts.paths.0"),
    "environment": ({"rollouts": rollouts("${oc.env:ELSEWHERE}/b.jsonl")}, "rollouts.paths.0: .* '/elsewhere/b.jsonl'"),
    "model": ({"model": {"weights": WEIGHTS}}, "model.weights.path: .*/weights'"),
    "reference": ({"reference": {"checkpoint": WEIGHTS}}, "reference.checkpoint.path: .*/weights'"),
    "teacher": (
        {"teacher": {"checkpoint": WEIGHTS}, "advantages": {"type": "opd"}},
        "teacher.checkpoint.path: .*/weights'",
    ),
    "run": ({"checkpoint": {"resume": "/elsewhere/run"}}, "checkpoint.resume: .* '/elsewhere/run'"),
    "defaults": ({"defaults": ["../base.yaml"]}, r"recipe.yaml: defaults: must lie .*/base.yaml'"),
    "secret": ({"defaults": ["/etc/passwd"]}, r"recipe.yaml: defaults: must lie .* '/etc/passwd'"),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A recipe's folder; the working directory is another."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("ELSEWHERE", "/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "base.yaml", {"seed": 5})
    return tmp_path / "recipes"


@pytest.mark.parametrize("name", NAMED)
def test_a_path_outside_is_refused_until_the_recipe_says_so(own, name):
    changes, message = NAMED[name]
    recipe = write(own / "recipe.yaml", changed(changes))
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_recipe(recipe)
    assert "name its folder in may_read, or give the path on the command line" in str(caught.value)
    if name != "secret":
        write(recipe, changed({**changes, "may_read": ["/elsewhere", ".."] + ["~"] * (name == "home")}))
        loaded: Any = load_recipe(recipe)
        assert all(Path(path).is_absolute() and ".." not in path for path in getattr(loaded.rollouts, "paths", []))


def test_the_recipes_folder_and_the_working_directory_may_be_read(own, tmp_path):
    inside = [str(own / "data/a.jsonl"), "b.jsonl", str(tmp_path / "work/c.jsonl"), "../work/d.jsonl"]
    recipe = write(own / "recipe.yaml", changed({"rollouts": rollouts(*inside)}))
    loaded: Any = load_recipe(recipe)
    assert loaded.rollouts.paths == [
        str(path) for path in (own / "data/a.jsonl", own / "b.jsonl", Path.cwd() / "c.jsonl", Path.cwd() / "d.jsonl")
    ]


@pytest.mark.parametrize(
    "override",
    [
        "rollouts.paths=[/elsewhere/a.jsonl]",
        "rollouts={type: files, paths: [/elsewhere/a.jsonl], sequences_per_step: 4}",
    ],
)
def test_the_command_line_may_name_anything_but_for_its_own_field_alone(own, override):
    recipe = write(own / "recipe.yaml", changed({"rollouts": rollouts("/secret/a.jsonl")}))
    loaded: Any = load_recipe(recipe, [override])
    assert loaded.rollouts.paths == ["/elsewhere/a.jsonl"]
    write(recipe, changed({"rollouts": rollouts("a.jsonl"), "model": {"weights": WEIGHTS}}))
    with pytest.raises(ConfigurationError, match=r"model\.weights\.path: must lie"):
        load_recipe(recipe, [override])


def test_relative_paths_of_the_command_line_begin_at_the_working_directory(own):
    """What a shell completes; those that the recipe names begin at its folder."""
    recipe = write(own / "recipe.yaml", changed({"rollouts": rollouts("a.jsonl"), "model": {"weights": WEIGHTS}}))
    loaded: Any = load_recipe(recipe, ["model.weights.path=../models/it"])
    assert loaded.model.weights.path == str(Path.cwd().parent / "models/it")
    assert loaded.rollouts.paths == [str(own / "a.jsonl")]
    loaded = load_recipe(recipe, ["rollouts.paths=[b.jsonl]", "model.weights.path=it"])
    assert loaded.rollouts.paths == [str(Path.cwd() / "b.jsonl")]


def test_a_recipe_that_a_run_has_kept_can_be_read_from_its_folder(own, tmp_path, monkeypatch):
    recipe = write(own / "recipe.yaml", changed({"rollouts": rollouts("../data/a.jsonl"), "may_read": ["../data"]}))
    loaded = load_recipe(recipe, ["reference.checkpoint={type: megatron, path: /elsewhere/run}"])
    kept = write(tmp_path / "runs/r-1/recipe.yaml", loaded.model_dump(mode="json"))
    monkeypatch.chdir(tmp_path / "runs")
    assert load_recipe(kept) == loaded


def test_a_base_cannot_lead_further_than_the_recipe_may_read(own):
    write(own / "shared/base.yaml", {"defaults": ["../../base.yaml"]})
    recipe = write(own / "recipe.yaml", changed({"defaults": ["shared/base.yaml"]}))
    with pytest.raises(ConfigurationError, match=r"shared/base\.yaml: defaults: must lie"):
        load_recipe(recipe)


def test_what_is_checked_is_what_is_opened(own, tmp_path):
    """``link/..`` is the recipe's folder, not the one above what the link leads to."""
    own.mkdir()
    (tmp_path / "far/away").mkdir(parents=True)
    (own / "link").symlink_to(tmp_path / "far/away")
    recipe = write(own / "recipe.yaml", changed({"rollouts": rollouts("link/../a.jsonl", "link/b.jsonl")}))
    loaded: Any = load_recipe(recipe)
    assert loaded.rollouts.paths == [str(own / "a.jsonl"), str(own / "link/b.jsonl")]


def test_defaults_that_multiply_are_counted(own):
    for number in range(20):
        write(own / f"{number}.yaml", {"defaults": [f"{number + 1}.yaml"] * 2})
    write(own / "20.yaml", {})
    with pytest.raises(ConfigurationError, match="defaults must name at most 64 files in all"):
        load_recipe(own / "0.yaml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load_from_any_folder(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load_recipe(path)


@pytest.mark.parametrize("name", ["../setup.py", "/etc/passwd", "a/../../b"])
def test_a_package_gives_its_own_files_alone(name):
    with pytest.raises(ConfigurationError, match="the package megatron_support has no"):
        resolve_path(f"package:megatron_support/{name}")


def test_no_value_of_a_recipe_is_imported(own):
    """A module's name in any text field is a wrong value, and the module stays unloaded."""
    module = "antigravity"
    assert module not in sys.modules
    for field in ("loss.surrogate", "advantages", "rollouts", "model.weights", "optimizer.schedule"):
        for value in (module, f"{module}:run", f"{module}.run"):
            recipe = write(own / "recipe.yaml", changed({field: {"type": value}}))
            with pytest.raises(ConfigurationError):
                load_recipe(recipe)
    with pytest.raises(ConfigurationError):
        resolve_path(f"package:{module}/x.gguf")
    assert module not in sys.modules


def test_nothing_in_the_package_runs_text_or_unpickles():
    """Modules are imported by names that stand in the code, and files that anybody else can write are not unpickled."""
    wrong = []
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / "megatron/file_queue.py"}:  # a file without a name, between forks
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name, place = ast.unparse(node.func), f"{path.relative_to(PACKAGE)}:{node.lineno}"
            if name in ("eval", "exec", "__import__", "pydoc.locate", "yaml.load", "yaml.unsafe_load", "os.system"):
                wrong.append(f"{place}: {name}")
            if name.startswith(("pickle.", "cloudpickle.", "dill.", "joblib.")) and name.endswith(("load", "loads")):
                wrong.append(f"{place}: {name}")
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if name == "torch.load" and not safe:
                wrong.append(f"{place}: torch.load without weights_only=True")
    assert not wrong
