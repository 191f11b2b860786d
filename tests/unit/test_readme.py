"""The README names commands, recipes and files that exist."""

import re
from pathlib import Path

import pytest

from megatron_support.__main__ import _parser

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_scripts_exist_and_can_be_executed():
    names = set(re.findall(r"scripts/[\w.]+\.sh", README))
    assert {"scripts/quickstart.sh", "scripts/test.sh", "scripts/fetch_smollm2.sh"} <= names
    for name in names:
        assert (ROOT / name).stat().st_mode & 0o111, f"{name} is not executable"


def test_recipes_and_links_exist():
    paths = set(re.findall(r"configs/[\w./]+\.yaml", README)) | set(re.findall(r"\]\((?!http)([^)#]+)\)", README))
    assert "configs/quickstart.yaml" in paths and "examples/images/data_flow.svg" in paths
    for path in paths:
        assert (ROOT / path).exists(), f"README.md names {path}"


def test_commands_are_those_of_the_parser():
    named = set(re.findall(r"`megatron-support (\w+)", README))
    known = set(next(a.choices for a in _parser()._actions if a.choices))
    assert named == known, "every command is described, and no other"


def test_the_two_commands_come_first():
    """Within the first 25 lines: a newcomer sees them without scrolling."""
    top = "\n".join(README.splitlines()[:25])
    assert "scripts/quickstart.sh" in top and "scripts/test.sh" in top


def test_ci_runs_the_test_command():
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("folder", sorted(p.name for p in (ROOT / "megatron_support").iterdir() if p.is_dir()))
def test_every_room_is_in_the_table(folder):
    if not folder.startswith("__") and folder != "adapters":
        assert f"{folder}/" in README
