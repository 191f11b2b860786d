"""What CI installs (scripts/requirements-ci.txt) is pinned, hashed, and agrees with setup.py and the constraints."""

import re
import runpy
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CI_ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "platform_system": "Linux", "extra": ""}


def _locked() -> dict[str, tuple[str, str]]:
    text = (ROOT / "scripts" / "requirements-ci.txt").read_text()
    entries = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)((?: \\\n\s+--hash=\S+)*)$", text, re.MULTILINE)
    return {canonicalize_name(name): (version, hashes) for name, version, hashes in entries}


def _constraints() -> list[Requirement]:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [r for r in requirements if r.marker is None or r.marker.evaluate(CI_ENVIRONMENT)]


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict:
    found: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_every_locked_package_has_a_sha256():
    locked = _locked()
    lines = (ROOT / "scripts" / "requirements-ci.txt").read_text().splitlines()
    assert len(locked) == sum("==" in line for line in lines), "a line isn't NAME==VERSION with hashes"
    assert [name for name, (_, hashes) in locked.items() if "--hash=sha256:" not in hashes] == []


def test_lock_agrees_with_the_constraints():
    locked = _locked()
    differing = {}
    for constraint in _constraints():
        version = locked.get(canonicalize_name(constraint.name), ("missing", ""))[0]
        if version == "missing" or version.split("+")[0] not in constraint.specifier:
            differing[str(constraint)] = version
    assert differing == {}, "run scripts/lock.sh"


def test_lock_holds_all_that_setup_asks_for(setup_arguments):
    locked = _locked()
    wanted = [
        *setup_arguments["install_requires"],
        *setup_arguments["extras_require"]["dev"],
        *setup_arguments["extras_require"]["hf"],
    ]
    unmet = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate(CI_ENVIRONMENT):
            continue
        version = locked.get(canonicalize_name(requirement.name), ("", ""))[0].split("+")[0]
        if not version or version not in requirement.specifier:
            unmet.append(str(requirement))
    assert unmet == [], "run scripts/lock.sh"


def test_setup_asks_for_what_checkpoints_need(setup_arguments):
    """Megatron-Core's forked writers use psutil and do not ask for it: without it they die, and the rank hangs."""
    assert "psutil" in {Requirement(line).name for line in setup_arguments["install_requires"]}
