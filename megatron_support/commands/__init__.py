"""One module per command: ``add(commands)`` declares it, and imports what it runs only when it runs."""

from megatron_support.commands import (
    check,
    convert,
    doctor,
    export,
    inspect,
    recipe,
    replay,
    report,
    score,
    tasks,
    train,
    validate,
)

COMMANDS = (
    train,
    validate,
    recipe,
    report,
    inspect,
    convert,
    score,
    replay,
    export,
    check,
    doctor,
    tasks,
)

__all__ = ["COMMANDS"]
