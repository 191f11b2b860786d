"""Built-in tasks: deterministic prompts, rewards worked out by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_support.errors import ConfigurationError
from megatron_support.training import tasks
from megatron_support.training.tasks import BOS, EOS, PAD, get_task, register_task, registered_tasks

# task, question, right answer
ANSWERS = [
    ("sort", "dbca>", "abcd"),
    ("sort", "bbaa>", "aabb"),
    ("swap", "db>", "bd"),
    ("addition", "3+4=", "7"),
    ("addition", "9+9=", "18"),
]


@pytest.mark.parametrize(("name", "question", "answer"), ANSWERS)
def test_the_right_answer_and_only_it_earns_one(name, question, answer):
    task = get_task(name)
    prompt = task.encode(question)
    right = [*answer.encode(), EOS] if task.must_end else [*answer.encode()]
    assert task.reward(prompt, right) == 1.0
    assert task.reward(prompt, [*right, ord("a"), EOS]) == 1.0, "what follows is not read"
    for position in range(len(right)):
        wrong = list(right)
        wrong[position] = ord("~")
        assert task.reward(prompt, wrong) < 1.0
    assert task.reward(prompt, right[:-1]) < 1.0


def test_partial_credit_by_hand():
    sort, addition = get_task("sort"), get_task("addition")
    prompt = sort.encode("dbca>")
    # expected a b c d: one right letter, one wrong letter of the alphabet (0.2), two tokens outside it
    assert sort.reward(prompt, [ord("a"), ord("a"), ord("x"), EOS]) == pytest.approx((1 + 0.2) / 4)
    assert sort.reward(prompt, []) == 0.0
    # expected 1 8 EOS: a digit where the end belongs earns nothing
    prompt = addition.encode("9+9=")
    assert addition.reward(prompt, [*b"188"]) == pytest.approx(2 / 3)
    assert addition.reward(prompt, [ord("1"), EOS]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("task", registered_tasks(), ids=lambda task: task.name)
def test_prompts_are_a_function_of_step_and_seed(task):
    first = task.prompts(3, 20, seed=7)
    assert task.prompts(3, 20, seed=7) == first
    assert task.prompts(4, 20, seed=7) != first
    assert task.prompts(3, 20, seed=8) != first
    for prompt in first:
        assert prompt[0] == BOS and len(prompt) <= task.longest_prompt
        assert task.encode(task.decode(prompt)) == prompt
        assert all(0 <= token < task.vocab_size for token in prompt)


def test_prompts_are_the_same_in_another_process():
    """Every rank makes its own: Python's hash seed must not enter."""
    program = (
        "from megatron_support.training.tasks import get_task;"
        "import sys; sys.stdout.write(repr(get_task('sort').prompts(1, 4, 5)))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {repr(get_task("sort").prompts(1, 4, 5))}


def test_special_tokens_are_not_text():
    assert get_task("sort").decode([BOS, *b"ab", EOS, PAD]) == "ab"


def test_an_unknown_task_is_named_with_the_nearest():
    with pytest.raises(
        ConfigurationError, match=r"rollouts\.task must be a registered task, got 'sorte'; did you mean 'sort'\?"
    ):
        get_task("sorte")
    with pytest.raises(ConfigurationError, match="use one of: addition"):
        get_task("zzz")


def test_a_name_is_registered_once():
    task = get_task("sort")
    assert register_task(task) is task
    with pytest.raises(ConfigurationError, match="'sort' is registered already"):
        register_task(type(task)(**{**vars(task), "partial_credit": 0.0}))


def test_the_example_of_the_readme_works(monkeypatch):
    monkeypatch.setattr(tasks, "_TASKS", dict(tasks._TASKS))
    readme = (Path(tasks.__file__).parent / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    exec(compile(example, "README.md", "exec"), {})
    double = get_task("double")
    assert double.reward(double.encode("c>"), list(b"cc")) == 1.0
    assert all(len(prompt) == double.longest_prompt for prompt in double.prompts(0, 8, seed=1))
