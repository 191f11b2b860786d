"""Changes to objects of other packages, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Attributes set on foreign objects, with what they replaced."""

    def __init__(self) -> None:
        self.applied: list[Callable[[Patches], None]] = []
        self._undo: list[Callable[[], Any]] = []

    def apply(self, step: Callable[[Patches], None]) -> None:
        if step not in self.applied:
            step(self)
            self.applied.append(step)

    def set(self, target: Any, name: str, value: Any) -> None:
        missing = name not in vars(target)
        original = vars(target).get(name)  # from vars: a staticmethod stays one
        setattr(target, name, value)
        self._undo.append(lambda: delattr(target, name) if missing else setattr(target, name, original))

    def on_undo(self, action: Callable[[], Any]) -> None:
        self._undo.append(action)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.applied.clear()
