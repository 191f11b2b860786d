"""Registration: which hosts are here, what was hooked into each, and the way back."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_support.adapters.hooks import Hooks, HostAdapter, HostReport, MissingSymbol, importable
from megatron_support.errors import ConfigurationError

logger = logging.getLogger(__name__)

PACKAGES = {"megatron_lm": "megatron.training", "verl": "verl", "nemo_rl": "nemo_rl", "slime": "slime"}
"""Importable where a host is there."""
HOSTS = tuple(PACKAGES)

_active: dict[str, tuple[Hooks, HostReport]] = {}


@dataclass(frozen=True)
class Report:
    """What :func:`register` found and did."""

    hosts: tuple[HostReport, ...]

    @property
    def hooked(self) -> tuple[str, ...]:
        """Names of the hosts into which anything is hooked."""
        return tuple(report.host for report in self.hosts if report.hooked)

    def __getitem__(self, host: str) -> HostReport:
        return next(report for report in self.hosts if report.host == host)

    def __iter__(self) -> Iterator[HostReport]:
        return iter(self.hosts)

    def __str__(self) -> str:
        return "\n".join(map(str, self.hosts))


def register(host: str | None = None) -> Report:
    """Hook the policy loss and the log-probability pass into the RL frameworks of this process.

    Each host is changed through its own extension point (a registry, a class or function that its trainer looks up).
    A second call changes nothing more. :func:`unregister` puts every original back.

    Args:
        host: one of ``megatron_lm``, ``verl``, ``nemo_rl``, ``slime``; None for every one that can be imported, where
            one that cannot be hooked is reported and left as it was.

    Returns:
        What was hooked and what was declined, with the reason; printing it gives a summary.

    Raises:
        ConfigurationError: ``host`` is unknown, is not installed, or lacks a symbol; the message names host, version
            and symbol. Nothing of that host is left changed.
    """
    return Report(tuple(_register(_adapter(name), named=host is not None) for name in _chosen(host)))


def unregister(host: str | None = None) -> None:
    """Undo :func:`register`: every replaced attribute is the original object again. Idempotent.

    Args:
        host: one host; None for all.
    """
    for name in _chosen(host):
        if name in _active:
            hooks, _ = _active.pop(name)
            hooks.undo()
            logger.info("%s: unhooked", name)


def installed() -> tuple[tuple[HostAdapter, str | None], ...]:
    """Every host, with its version where it can be imported. Imports and changes none."""
    adapters = [_adapter(name) for name in HOSTS]
    return tuple((adapter, adapter.version if adapter.present else None) for adapter in adapters)


def _chosen(host: str | None) -> tuple[str, ...]:
    if host is None:
        return HOSTS
    if host not in HOSTS:
        raise ConfigurationError(f"host must be one of {', '.join(HOSTS)}, got {host!r}; use one of them, or None")
    return (host,)


def _adapter(name: str) -> HostAdapter:
    return importlib.import_module(f"megatron_support.adapters.{name}").HOST


def _register(adapter: HostAdapter, *, named: bool) -> HostReport:
    if adapter.name in _active:
        return _active[adapter.name][1]
    if not adapter.present:
        reason = f"{adapter.module} is not importable; install it ({adapter.guide})"
        if named:
            raise ConfigurationError(f"{adapter.name} must be installed to be registered by name: {reason}")
        return _declined(adapter.name, None, {"everything": reason})
    hooks = Hooks()
    hooked, declined = [], {}
    for hook in adapter.hooks:
        missing = [module for module in hook.needs if not importable(module)]
        if missing:
            declined[hook.what] = f"{', '.join(missing)} is not importable in this process"
            continue
        try:
            hook.apply(hooks)
        except MissingSymbol as error:
            hooks.undo()
            message = f"{hook.what}: {error} in {adapter.name} {adapter.version}"
            if named:
                raise ConfigurationError(f"{message}; use a release that has it ({adapter.guide})") from error
            return _declined(adapter.name, adapter.version, {hook.what: str(error)})
        hooked.append(hook.what)
    report = HostReport(
        host=adapter.name,
        version=adapter.version,
        hooked=tuple(hooked),
        declined=declined,
        originals=dict(hooks.originals),
    )
    _active[adapter.name] = (hooks, report)
    logger.info("%s", report)
    return report


def _declined(name: str, version: str | None, reasons: dict[str, str]) -> HostReport:
    report = HostReport(host=name, version=version, declined=reasons)
    logger.info("%s", report)
    return report
