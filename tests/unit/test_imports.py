"""Imports go one way, and importing the package costs nothing beyond torch."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_support
from megatron_support.adapters import HOSTS

PACKAGE = Path(megatron_support.__file__).parent

BASE = {"errors", "types", "config", "metrics", "kl"}
ROOMS = {"support", "loss", "advantages", "rollouts"}
MEGATRON = {"megatron", "adapters"}
MAY_IMPORT: dict[str, set[str]] = {
    **dict.fromkeys(BASE, BASE),
    **{name: BASE | {name} for name in ROOMS},
    "distributed": BASE | ROOMS | {"distributed"},
    "megatron": BASE | ROOMS | {"distributed", "megatron"},
    "adapters": BASE | ROOMS | {"distributed", "megatron", "adapters"},
    "training": BASE | ROOMS | {"distributed", "megatron", "training"},
    "commands": BASE | ROOMS | {"distributed", "megatron", "training", "adapters", "commands"},
    "autoload": {"adapters"},
    "__main__": BASE | {"commands"},
    "__init__": set(),
}


def room(path: Path) -> str:
    """The first part of a module's name inside the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, full name) of everything a module imports, inside functions too; ``from a import b`` is ``a.b``."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8")), path))


def _imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    package = ("megatron_support", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def used_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every attribute chain, e.g. ``torch.distributed.all_reduce``, and of what is imported."""
    yield from imports(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_arrow_points_the_wrong_way(path):
    allowed = MAY_IMPORT[room(path)]
    wrong = [
        f"line {line}: {name}"
        for line, name in imports(path)
        if name.split(".")[0] == "megatron_support" and name.split(".")[1] not in allowed | {"__version__"}
    ]
    assert not wrong, f"{room(path)} may import {sorted(allowed)} only, got {wrong}"


def test_imports_are_read_in_every_form():
    code = "import a.b as c\nfrom ..loss import x\nfrom . import y\ndef f():\n    from megatron_support import loss"
    found = _imports(ast.parse(code), PACKAGE / "rollouts" / "new.py")
    names = ["a.b", "megatron_support.loss.x", "megatron_support.rollouts.y", "megatron_support.loss"]
    assert sorted(name for _, name in found) == sorted(names)


def test_every_folder_has_a_place_in_the_order():
    assert {room(path) for path in modules()} == set(MAY_IMPORT)


def test_megatron_core_is_imported_in_its_own_room_only():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in modules()
        if room(path) not in MEGATRON
        for line, name in used_names(path)
        if name == "megatron" or name.startswith("megatron.") or "parallel_state" in name.split(".")
    ]
    assert not wrong


def test_loss_advantages_and_rollouts_know_of_no_other_rank():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in modules()
        if room(path) in {"loss", "advantages", "rollouts", *BASE}
        for line, name in used_names(path)
        if name.startswith(("torch.distributed", "dist."))
    ]
    assert not wrong


def test_hosts_do_not_import_each_other():
    """What a host's adapter imports of this room is its own or shared; what is shared imports no host by name."""
    for path in (PACKAGE / "adapters").rglob("*.py"):
        own = path.relative_to(PACKAGE / "adapters").parts[0].removesuffix(".py")
        for line, name in imports(path):
            parts = name.split(".")
            other = parts[2] if parts[:2] == ["megatron_support", "adapters"] and len(parts) > 2 else own
            assert other == own or other not in HOSTS, f"{path.relative_to(PACKAGE)}:{line}: {name}"


def test_adapters_are_imported_where_a_host_asks_for_them_only():
    users = {
        room(path)
        for path in modules()
        if room(path) != "adapters" and any(name.startswith("megatron_support.adapters") for _, name in imports(path))
    }
    assert users <= {"autoload", "commands"}


def in_a_fresh_interpreter(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_importing_the_package_imports_the_standard_library_at_most():
    """Against a bare interpreter, which may load what its environment asks for (.pth files)."""
    names = "json.dumps(sorted({name.split('.')[0] for name in sys.modules}))"
    bare = in_a_fresh_interpreter(f"import sys, json; print({names})")
    ours = in_a_fresh_interpreter(f"import sys, json, megatron_support; print({names})")
    assert set(ours) - set(bare) - set(sys.stdlib_module_names) == {"megatron_support"}


@pytest.mark.parametrize("name", megatron_support.__all__)
def test_public_names_resolve(name):
    assert getattr(megatron_support, name) is not None
    assert name in dir(megatron_support)


def test_public_names_of_megatron_resolve():
    host = importlib.import_module("megatron_support.megatron")
    assert host.__all__
    for name in host.__all__:
        assert getattr(host, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        megatron_support.nothing  # noqa: B018
