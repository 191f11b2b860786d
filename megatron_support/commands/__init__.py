"""One module per command: ``add(commands)`` declares it, and imports what it runs only when it runs."""

from megatron_support.commands import check, doctor, export, inspect, recipe, report, tasks, train, validate

COMMANDS = (
    train,
    validate,
    recipe,
    report,
    inspect,
    export,
    check,
    doctor,
    tasks,
)

__all__ = ["COMMANDS"]
