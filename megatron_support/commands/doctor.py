"""``megatron-support doctor``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron_support.commands.common import BAD_INPUT, SUCCESS

if TYPE_CHECKING:
    from megatron_support.adapters.hooks import HostAdapter
    from megatron_support.commands.common import Commands
    from megatron_support.training.doctor import Finding


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = commands.add_parser("doctor", help="what this machine has, what is in use, what is missing")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Examine this machine and print the findings."""
    from rich.console import Console

    from megatron_support.adapters.registry import installed
    from megatron_support.training.doctor import examine, print_findings

    findings = examine()
    if not any(finding.state == "broken" for finding in findings):  # adapters import torch
        findings += [_host(adapter, version) for adapter, version in installed()]
    print_findings(findings, Console())
    return BAD_INPUT if any(finding.state == "broken" for finding in findings) else SUCCESS


def _host(adapter: HostAdapter, version: str | None) -> Finding:
    from megatron_support.training.doctor import Finding

    if version is not None:
        return Finding(item=adapter.name, state="ok", value=version)
    guide = adapter.guide.removesuffix("/README.md")  # its folder fits into a line
    return Finding(item=adapter.name, state="not used", value="not importable", remedy=f"see {guide}")
