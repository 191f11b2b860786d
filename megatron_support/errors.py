"""Errors a user can act on. Each message names the value, the rule and the remedy."""

from __future__ import annotations


class ConfigurationError(ValueError):
    """A recipe, a layout or an argument breaks a rule. The command line prints it and exits with code 2."""


class RolloutError(ValueError):
    """Rollout data breaks a rule: a file, line and field, or a sample and a token, is at fault."""


class LogprobFault(ValueError):
    """A log-probability that must be finite is not (DESIGN decision 2).

    Raised on every rank with the same message, before the optimizer step.
    """
