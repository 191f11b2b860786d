"""Pages name files, commands, fields and messages that exist; what they print as code runs."""

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from megatron_support import ActorLossConfig, actor_loss
from megatron_support.__main__ import _parse, main
from megatron_support.config import Recipe, load_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = sorted([*EXAMPLES.rglob("*.md"), *(ROOT / "configs").glob("README.md"), ROOT / "README.md"])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_can_be_parsed_and_recipes_exist(page):
    for line in "\n".join(blocks(page, "bash")).replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["megatron-support"]:
            continue
        arguments = words[1 : words.index(">")] if ">" in words else words[1:]
        _parse(arguments)
        for word in arguments:
            if word.startswith(("configs/", "examples/")):
                assert (ROOT / word).exists(), line


def test_messages_are_those_of_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "megatron_support").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message may stand on two lines
    table = (EXAMPLES / "troubleshooting.md").read_text().split("## Nothing")[0]
    fragments = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(fragments) >= 12
    for fragment in fragments:
        assert fragment in joined, fragment


def test_the_tutorials_mistake_is_answered_as_it_says(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = next(
        line for line in "".join(blocks(EXAMPLES / "tutorial.md", "bash")).splitlines() if "surogate" in line
    )
    assert main(shlex.split(command)[1:]) == 2
    assert "loss.surogate: unknown field; did you mean 'surrogate'?" in capsys.readouterr().err


def test_the_tutorials_recipe_is_valid(tmp_path):
    """As a reader would write it at the repository's root, here in a folder beside copies of what it names."""
    own, further = blocks(EXAMPLES / "tutorial.md", "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "mine.yaml").write_text(own)
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert (recipe.name, recipe.loss.surrogate.type, recipe.train.minibatches) == ("mine", "cispo", 2)
    tree = recipe.model_dump() | {"model": yaml.safe_load(further)["model"]}
    assert Recipe.from_dict(tree).model.weights.type == "huggingface"


def test_the_page_about_extending_runs(capsys):
    surrogate, wrapper, batch = blocks(EXAMPLES / "extending.md", "python")
    exec(batch, {})
    assert capsys.readouterr().out == "1 [True]\n"
    exec(f"{surrogate}\n{wrapper}", {})
    config = ActorLossConfig.from_dict({"surrogate": {"type": "ppo_shifted", "shift": 0.25}})
    tokens = torch.full((1, 3), -1.0)
    output = actor_loss(
        config, curr_logprobs=tokens, prev_logprobs=tokens, advantages=tokens, response_mask=torch.tensor([[1, 1, 0]])
    )
    assert output.loss == 0.75
    assert surrogate.split("def ")[1].split("(")[0] in (EXAMPLES / "custom_surrogate.py").read_text()


def test_fields_that_the_page_about_exclusions_names_exist():
    reference = (ROOT / "configs/REFERENCE.md").read_text()
    for field in re.findall(r"`(?:loss|logprobs|train)\.(\w+)", (EXAMPLES / "why_excluded.md").read_text()):
        assert f"| `{field}` |" in reference, field
