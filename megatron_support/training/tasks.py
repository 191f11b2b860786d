"""Built-in verifiable tasks for the sampler: a prompt, a response, and a reward that a program works out.

They share a byte-level vocabulary, so a model of any size can learn them from random weights and nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_support.config.base import choice_meant
from megatron_support.config.recipe import Recipe
from megatron_support.errors import ConfigurationError

PAD, BOS, EOS = 256, 257, 258
BYTE_VOCABULARY = 259
"""256 bytes, then padding, beginning of sequence and end of sequence."""


class Task(Protocol):
    """What :class:`megatron_support.training.sources.SamplerSource` needs of a task."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """One sentence for ``megatron-support tasks``."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> int:
        """The token that ends a response."""
        ...

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        ...

    def prompts(self, step: int, count: int, seed: int) -> list[list[int]]:
        """``count`` prompts of one step: a pure function of its arguments, the same on every rank."""
        ...

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """In [0, 1]; ``response`` ends with ``eos`` unless it was cut off."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Readable text; special tokens are left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTask:
    """A question and its one right answer, in bytes.

    The reward compares the response with what is expected, position by position, so that a model that gets a single
    character right already hears of it:

        ``reward = sum_i credit(response[i], expected[i]) / len(expected)``

    where credit is 1 for the expected token, ``partial_credit`` for another character of ``alphabet`` where the answer
    has one, and else 0. Expected is the answer, followed by the end of the sequence where ``must_end``. What stands
    behind it is not read.
    """

    name: str
    description: str
    question: Callable[[random.Random], str]
    """A random question."""
    answer: Callable[[str], str]
    """The right answer to a question."""
    alphabet: str
    """Characters that answers are made of."""
    longest_question: int
    partial_credit: float = 0.2
    must_end: bool = False
    """Whether the end of the sequence has to follow the answer: where answers differ in length."""

    @property
    def vocab_size(self) -> int:
        return BYTE_VOCABULARY

    @property
    def eos(self) -> int:
        return EOS

    @property
    def longest_prompt(self) -> int:
        return 1 + self.longest_question

    def prompts(self, step: int, count: int, seed: int) -> list[list[int]]:
        generator = random.Random(f"{self.name}:{seed}:{step}")  # hashed by content: the same in every process
        return [self.encode(self.question(generator)) for _ in range(count)]

    def reward(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        answer = self.answer(self.decode(prompt)).encode()
        expected = [*answer, EOS] if self.must_end else [*answer]
        allowed = set(self.alphabet.encode())
        credit = 0.0
        for position, (got, wanted) in enumerate(zip(response, expected, strict=False)):
            if got == wanted:
                credit += 1.0
            elif position < len(answer) and got in allowed:
                credit += self.partial_credit
        return credit / len(expected)

    def encode(self, text: str) -> list[int]:
        return [BOS, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


_TASKS: dict[str, Task] = {}


def register_task(task: Task) -> Task:
    """Make a task known by its name, for recipes.

    Raises:
        ConfigurationError: the name is taken by another task.
    """
    if _TASKS.setdefault(task.name, task) is not task:
        raise ConfigurationError(f"a task named {task.name!r} is registered already; choose another name")
    return task


def get_task(name: str) -> Task:
    """The task of a recipe's ``rollouts.task``.

    Raises:
        ConfigurationError: there is none of that name.
    """
    broken = unknown_task(name)
    if broken is not None:
        raise ConfigurationError(f"rollouts.task {broken}")
    return _TASKS[name]


def unknown_task(name: str) -> str | None:
    """Rule and remedy where no task has that name, else None."""
    if name in _TASKS:
        return None
    return f"must be a registered task, got {name!r}; {choice_meant(name, sorted(_TASKS))}"


def task_of(recipe: Recipe) -> Task | None:
    """The task of a recipe that samples, None for one that reads files.

    Raises:
        ConfigurationError: there is none of its name.
    """
    return get_task(recipe.rollouts.task) if recipe.rollouts.type == "sampler" else None


def registered_tasks() -> list[Task]:
    """All tasks, by name."""
    return [_TASKS[name] for name in sorted(_TASKS)]


def _letters(alphabet: str, count: int) -> Callable[[random.Random], str]:
    return lambda generator: "".join(generator.choices(alphabet, k=count)) + ">"


def _sum_question(generator: random.Random) -> str:
    return f"{generator.randrange(10)}+{generator.randrange(10)}="


def _sum_answer(question: str) -> str:
    left, right = question.removesuffix("=").split("+")
    return str(int(left) + int(right))


register_task(
    ByteTask(
        name="sort",
        description="put four letters in order: dbca> -> abcd",
        question=_letters("abcd", 4),
        answer=lambda question: "".join(sorted(question.removesuffix(">"))),
        alphabet="abcd",
        longest_question=5,
    )
)
register_task(
    ByteTask(
        name="swap",
        description="write two letters the other way round: db> -> bd",
        question=_letters("abcd", 2),
        answer=lambda question: question.removesuffix(">")[::-1],
        alphabet="abcd",
        longest_question=3,
    )
)
register_task(
    ByteTask(
        name="addition",
        description="add two digits: 3+4= -> 7",
        question=_sum_question,
        answer=_sum_answer,
        alphabet="0123456789",
        longest_question=4,
        must_end=True,
    )
)
