"""What registration changes in a host: attributes replaced and entries added, each with a way back."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_support.errors import ConfigurationError


class MissingSymbol(ConfigurationError):
    """A host lacks what a hook needs."""


class Hooks:
    """Changes made to one host, newest undone first.

    ``originals`` holds, by label, what each change replaced, for as long as the change stands.
    """

    def __init__(self) -> None:
        self.originals: dict[str, Any] = {}
        self._undo: list[Callable[[], Any]] = []

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.originals)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Set an attribute of a module or class that has it, and return what was there.

        Raises:
            MissingSymbol: the owner itself has no such attribute.
        """
        label = f"{_name_of(owner)}.{name}"
        if name not in vars(owner):
            raise MissingSymbol(f"{label} does not exist")
        original = vars(owner)[name]  # from vars: a staticmethod stays one
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))
        self.originals[label] = original
        return original

    def insert(self, mapping: MutableMapping[str, Any], key: str, value: Any, *, label: str) -> None:
        """Set an entry of a host's registry; None is the original of an entry that was not there."""
        present = key in mapping
        original = mapping.get(key)
        mapping[key] = value
        self._undo.append(lambda: mapping.update({key: original}) if present else mapping.pop(key, None))
        self.originals[label] = original

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.originals.clear()


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One change, and what must be importable before it makes sense."""

    what: str
    """For the report, e.g. ``policy loss``."""
    apply: Callable[[Hooks], None]
    """Raises :class:`MissingSymbol` where the host has not what it needs."""
    needs: tuple[str, ...] = ()
    """Modules without which this hook is declined, not failed: a driver process may lack the trainer's packages."""


@dataclass(frozen=True, kw_only=True)
class HostAdapter:
    """One host framework."""

    name: str
    module: str
    """Importable where the host is there."""
    distributions: tuple[str, ...]
    """Names under which it may be installed, for its version."""
    hooks: tuple[Hook, ...]
    guide: str
    """Where a user reads how to use it."""

    @property
    def present(self) -> bool:
        return importable(self.module)

    @property
    def version(self) -> str:
        """As the installed distribution or the module says, else ``unknown``."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return str(getattr(sys.modules.get(self.module), "__version__", "unknown"))


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """What registration did with one host."""

    host: str
    version: str | None
    """None where the host is not importable."""
    hooked: tuple[str, ...] = ()
    """What was hooked, e.g. ``policy loss``."""
    declined: dict[str, str] = field(default_factory=dict)
    """What was not, and why."""
    originals: dict[str, Any] = field(default_factory=dict)
    """What each change replaced, by dotted name."""

    def __str__(self) -> str:
        lines = [f"{self.host} {self.version}" if self.version else self.host]
        lines += [f"  hooked    {what}" for what in self.hooked]
        lines += [f"  declined  {what}: {why}" for what, why in self.declined.items()]
        return "\n".join(lines)


def importable(module: str) -> bool:
    """Whether a module is imported or could be found, without importing it (its parent packages are)."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def host_module(name: str) -> ModuleType:
    """Import a module of a host.

    Raises:
        MissingSymbol: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingSymbol(f"module {name} cannot be imported ({error})") from error


def symbol(module: str, name: str) -> Any:
    """An attribute of a host's module.

    Raises:
        MissingSymbol: the module cannot be imported or has no such attribute.
    """
    found = getattr(host_module(module), name, None)
    if found is None:
        raise MissingSymbol(f"{module}.{name} does not exist")
    return found


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    return f"{owner.__module__}.{owner.__qualname__}"
