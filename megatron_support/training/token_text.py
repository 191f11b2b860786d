"""The text of a token, for reports: from the task, or from the tokenizer that stands beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from megatron_support.config.recipe import Weights
from megatron_support.megatron.weights.gguf import read_gguf_tokens
from megatron_support.training.tasks import Task


def token_text(weights: Weights, task: Task | None) -> Callable[[int], str]:
    """A function from token id to readable text, quoted; the empty string where there is none."""
    plain = plain_token_text(weights, task)
    eos = None if task is None else task.eos
    return lambda token: _quoted(plain(token), token == eos)


def _quoted(text: str, special: bool) -> str:
    return text if special or not text else repr(text)


def plain_token_text(weights: Weights, task: Task | None) -> Callable[[int], str]:
    """A function from token id to its text as it stands in a response; the empty string where there is none."""
    if task is not None:
        return lambda token: _task_text(task, token)
    names = _vocabulary(weights)
    return lambda token: _readable(names[token]) if token in names else ""


def _task_text(task: Task, token: int) -> str:
    if token == task.eos:
        return "<eos>"
    text = task.decode([token])
    return "" if "\ufffd" in text else text  # a byte of a longer character is no text


def _vocabulary(weights: Weights) -> dict[int, str]:
    if weights.type == "gguf":
        return dict(enumerate(read_gguf_tokens(weights.path)))
    if weights.type == "huggingface":
        return _huggingface_tokens(Path(weights.path) / "tokenizer.json")
    return {}


def _huggingface_tokens(path: Path) -> dict[int, str]:
    if not path.is_file():
        return {}
    tree = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tree.get("model", {}).get("vocab", {})
    pairs = (
        vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], i) for i, entry in enumerate(vocabulary))
    )
    names = {int(token): text for text, token in pairs}
    return names | {int(entry["id"]): entry["content"] for entry in tree.get("added_tokens", [])}


def _readable(text: str) -> str:
    """Undo the printable stand-ins of byte-level BPE and the word mark of SentencePiece."""
    table = _stand_ins()
    if all(character in table for character in text):
        return bytes(table[character] for character in text).decode("utf-8", errors="replace")
    return text.replace("\u2581", " ")


@lru_cache(maxsize=1)
def _stand_ins() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
