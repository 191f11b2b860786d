"""One module per command: ``add(commands)`` declares it, and imports what it runs only when it runs."""

from megatron_support.commands import doctor, inspect, report, tasks, train, validate

COMMANDS = (
    train,
    validate,
    report,
    inspect,
    doctor,
    tasks,
)

__all__ = ["COMMANDS"]
