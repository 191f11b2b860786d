"""Errors a user can act on. Each message names the value, the rule and the remedy."""

from __future__ import annotations

from typing import Any


class ConfigurationError(ValueError):
    """A recipe, a layout or an argument breaks a rule. The command line prints it and exits with code 2."""


class RolloutError(ValueError):
    """Rollout data breaks a rule: a file, line and field, or a sample and a token, is at fault."""


class Fault(ValueError):
    """A number that must be finite is not. Raised on every rank with the same message, before the optimizer step.

    Args:
        message: what, where, rule and remedy.
        rollouts: a RolloutBatch of the samples at fault with every column that was read; None where none is at fault.
    """

    def __init__(self, message: str, *, rollouts: Any = None) -> None:
        super().__init__(message)
        self.rollouts = rollouts


class LogprobFault(Fault):
    """A log-probability is not finite where it must be."""


class GradientFault(Fault):
    """The gradient is not finite although every log-probability is."""


class PeerError(RuntimeError):
    """Another rank has failed, by an exception that is none of ours; that rank tells the user."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written: the disk is full, or the folder is gone or closed to us."""
