"""One rollout of a file: what its fields must be, checked one by one before anything is built from it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_support.rollouts.fields import MAX_INTEGER, FieldError, flag, listed, required, short

MAX_LOGPROB = 1e-4
"""A log-probability is at most 0; an engine's rounding may leave it a little above."""

MAX_FP32 = 3.4028234663852886e38
"""Numbers are kept in fp32; a larger one would silently become infinite, which says "outside the support"."""

MIN_SAMPLING = 1e-37
"""A temperature or top_p below the normal fp32 numbers counts as 0."""

OPTIONAL_TOKEN_COLUMNS = (
    "prev_logprobs",
    "prev_logprobs_unfiltered",
    "curr_logprobs",
    "curr_logprobs_unfiltered",
    "reference_logprobs",
    "teacher_logprobs",
    "entropy",
    "values",
    "advantages",
)

FILTERED_COLUMNS = ("prev_logprobs", "curr_logprobs")
"""Optional columns in which -inf says "outside the support"."""

MAY_BE_UNKNOWN = ("rewards", "sampling", "generation_logprobs", *OPTIONAL_TOKEN_COLUMNS)
"""What ``unknown_fields`` may name."""


TEXT_FIELDS = ("id", "prompt_id", "prompt", "response", "unknown_fields")

FIELDS = (
    *TEXT_FIELDS,
    "tokens",
    "response_mask",
    "generation_logprobs",
    "reward",
    "sampling",
    "sample_mask",
    "support",
    "reward_components",
    *OPTIONAL_TOKEN_COLUMNS,
)
"""What a row is read for; a file may hold more."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A checked rollout of L tokens, in plain values."""

    id: str
    prompt_id: int | str
    prompt: str
    response: str
    tokens: list[int]
    response_mask: list[bool]
    generation_logprobs: list[float]
    """0 outside the response; -inf where the engine says the token is outside its support."""
    reward: float
    temperature: float
    top_k: int
    """0 for none."""
    top_p: float
    sample_mask: bool = True
    support: tuple[list[int], list[int]] | None = None
    """(token ids, offsets)."""
    columns: Mapping[str, list[float]] = field(default_factory=dict)
    """0 where a file has no number outside the response."""
    reward_components: list[float] | None = None
    unknown_fields: frozenset[str] = frozenset()
    place: str = ""
    """File and line."""


def check_row(data: Any, *, vocab_size: int | None = None, keep_faults: bool = False) -> Row:
    """Check one row of a file.

    Args:
        data: what the file holds, a mapping of plain values.
        vocab_size: ids at or above it are refused; None for no bound.
        keep_faults: take NaN and infinities in per-token columns as they are, for looking into a fault.

    Raises:
        FieldError: naming field, value, rule and remedy.
    """
    if not isinstance(data, Mapping):
        raise FieldError(f"a row must be an object of fields, got {short(data)}; write one JSON object a line")
    tokens = _token_ids(data, vocab_size)
    mask = _response_mask(data, len(tokens))
    temperature, top_k, top_p = _sampling(data)
    support = _support(data, tokens, mask, vocab_size)
    filtering = top_k > 0 or top_p < 1 or support is not None
    optional = [name for name in OPTIONAL_TOKEN_COLUMNS if data.get(name) is not None]
    return Row(
        id=str(_name(data, "id")),
        prompt_id=_name(data, "prompt_id"),
        prompt=_text(data, "prompt"),
        response=_text(data, "response"),
        tokens=tokens,
        response_mask=mask,
        generation_logprobs=_generation_logprobs(data, mask, filtering, keep_faults),
        reward=_reward(data),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        sample_mask=flag(data.get("sample_mask", True), "sample_mask"),
        support=support,
        columns={name: _column(data, name, mask, keep_faults) for name in optional},
        reward_components=_reward_components(data),
        unknown_fields=_unknown_fields(data),
    )


def _token_ids(data: Mapping[str, Any], vocab_size: int | None) -> list[int]:
    tokens = listed(data, "tokens", None)
    if len(tokens) < 2:
        raise FieldError(f"tokens: must hold a prompt and a response, got {len(tokens)} tokens; drop the row")
    check_ids("tokens", tokens, vocab_size)
    return tokens


def check_ids(name: str, ids: Sequence[Any], vocab_size: int | None = None) -> None:
    """Check that all entries of a field are token ids.

    Raises:
        FieldError: naming the first that is none.
    """
    bound = MAX_INTEGER if vocab_size is None else vocab_size
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise FieldError(f"{name}[{position}]: must be an integer token id, got {short(token)}; correct it")
        if not 0 <= token < bound:
            rule = "must be a token id >= 0" if vocab_size is None else f"must be in the vocabulary [0, {vocab_size})"
            raise FieldError(f"{name}[{position}]: {rule}, got {short(token)}; use the tokenizer of the model")


def _response_mask(data: Mapping[str, Any], length: int) -> list[bool]:
    mask = listed(data, "response_mask", length)
    result = [flag(entry, f"response_mask[{position}]") for position, entry in enumerate(mask)]
    if not any(result):
        raise FieldError("response_mask: must mark at least one response token, got none; drop the row")
    if result[0]:
        raise FieldError("response_mask[0]: must be 0, the first token is predicted from nothing; add a prompt token")
    return result


def _generation_logprobs(data: Mapping[str, Any], mask: list[bool], filtering: bool, keep_faults: bool) -> list[float]:
    values = listed(data, "generation_logprobs", len(mask))
    result = [0.0] * len(mask)
    for position, (value, is_response) in enumerate(zip(values, mask, strict=True)):
        if not is_response:
            continue
        where = f"generation_logprobs[{position}]"
        if value is None:
            raise FieldError(f"{where}: missing at a response token; ask the engine for it, or drop the row")
        if keep_faults and isinstance(value, float):
            result[position] = value
            continue
        if not _is_number(value):
            raise FieldError(f"{where}: must be a number, got {short(value)}; correct it or drop the row")
        if value > MAX_LOGPROB:
            raise FieldError(f"{where}: must be <= 0, got {short(value)}; give log-probabilities, not probabilities")
        if -math.inf < value < -MAX_FP32:
            raise FieldError(f"{where}: must fit into fp32, got {short(value)}; write -Infinity for a token outside")
        if value == -math.inf and not filtering:
            raise FieldError(
                f"{where}: must be finite without top_k, top_p < 1 or support, got -inf; give the row's sampling filter"
            )
        result[position] = float(value)
    return result


def _reward(data: Mapping[str, Any]) -> float:
    reward = required(data, "reward", (int, float), "a number")
    _check_finite("reward", reward)
    return float(reward)


def _reward_components(data: Mapping[str, Any]) -> list[float] | None:
    if data.get("reward_components") is None:
        return None
    values = listed(data, "reward_components", None)
    if not values:
        raise FieldError("reward_components: must hold at least one number, got none; add them or leave the field out")
    for position, value in enumerate(values):
        _check_finite(f"reward_components[{position}]", value)
    return [float(value) for value in values]


def _check_finite(name: str, value: Any) -> None:
    if not _is_number(value) or not -MAX_FP32 <= value <= MAX_FP32:
        raise FieldError(f"{name}: must be a finite number, got {short(value)}; correct it or drop the row")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _sampling(data: Mapping[str, Any]) -> tuple[float, int, float]:
    sampling = required(data, "sampling", (Mapping,), "an object with temperature, top_k and top_p")
    temperature = required(sampling, "temperature", (int, float), "a number", prefix="sampling.")
    if not MIN_SAMPLING < temperature <= MAX_FP32:
        raise FieldError(
            f"sampling.temperature: must be > 0 and finite, got {short(temperature)}; for greedy use top_k 1"
        )
    top_k = sampling.get("top_k")
    if top_k is not None and (type(top_k) is not int or not 1 <= top_k < MAX_INTEGER):
        raise FieldError(f"sampling.top_k: must be an integer >= 1, got {short(top_k)}; use null for no top-k")
    top_p = 1.0 if sampling.get("top_p") is None else required(sampling, "top_p", (int, float), "a number", "sampling.")
    if not MIN_SAMPLING < top_p <= 1:
        raise FieldError(f"sampling.top_p: must be in (0, 1], got {short(top_p)}; use 1.0 for no nucleus filter")
    return float(temperature), top_k or 0, float(top_p)


def _support(
    data: Mapping[str, Any], tokens: list[int], mask: list[bool], vocab_size: int | None
) -> tuple[list[int], list[int]] | None:
    support = data.get("support")
    if support is None:
        return None
    if not isinstance(support, Mapping):
        raise FieldError(f"support: must be null or an object with token_ids and offsets, got {short(support)}")
    ids = listed(support, "token_ids", None, prefix="support.")
    offsets = listed(support, "offsets", len(tokens) + 1, prefix="support.")
    if any(type(offset) is not int for offset in offsets):
        raise FieldError("support.offsets: must be integers; correct them")
    if offsets[0] != 0 or offsets[-1] != len(ids) or any(a > b for a, b in itertools.pairwise(offsets)):
        raise FieldError(
            f"support.offsets: must ascend from 0 to the number of token_ids {len(ids)}, got "
            f"{offsets[0]} ... {offsets[-1]}; write one more offset than tokens"
        )
    check_ids("support.token_ids", ids, vocab_size)
    for position, (token, is_response) in enumerate(zip(tokens, mask, strict=True)):
        if is_response and token not in ids[offsets[position] : offsets[position + 1]]:
            raise FieldError(
                f"support: token {position} ({token}) is missing from its own kept set; the sampler drew from it, so "
                "the data is wrong: correct it or drop the row"
            )
    return ids, offsets


def _column(data: Mapping[str, Any], name: str, mask: list[bool], keep_faults: bool) -> list[float]:
    """A per-token column. Outside the response anything may stand; what is no number there becomes 0."""
    values = listed(data, name, len(mask))
    result = [0.0] * len(mask)
    filtered = name in FILTERED_COLUMNS
    for position, (value, is_response) in enumerate(zip(values, mask, strict=True)):
        if _is_number(value) and (abs(value) <= MAX_FP32 or (filtered and value == -math.inf)):
            result[position] = float(value)
        elif is_response and keep_faults and isinstance(value, float):
            result[position] = value
        elif is_response:
            rule = "a finite number"
            if filtered:
                rule += ", or -Infinity for a token outside the support"
            raise FieldError(f"{name}[{position}]: must be {rule}, got {short(value)}; correct it or drop the row")
    return result


def _unknown_fields(data: Mapping[str, Any]) -> frozenset[str]:
    if data.get("unknown_fields") is None:
        return frozenset()
    names = listed(data, "unknown_fields", None)
    for position, name in enumerate(names):
        if name not in MAY_BE_UNKNOWN:
            raise FieldError(
                f"unknown_fields[{position}]: must be one of {', '.join(MAY_BE_UNKNOWN)}, got {short(name)}; correct it"
            )
    return frozenset(names)


def _name(data: Mapping[str, Any], name: str) -> int | str:
    value = required(data, name, (str, int), "a string or an integer")
    if isinstance(value, int):
        if abs(value) >= MAX_INTEGER:
            raise FieldError(f"{name}: must fit into 64 bits, got {short(value)}; write it as a string")
        return value
    return _text(data, name)


def _text(data: Mapping[str, Any], name: str) -> str:
    if data.get(name) is None:
        return ""
    text = required(data, name, (str,), "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair, which JSON can say; no file could hold it again
        raise FieldError(
            f"{name}: must be Unicode text, got half a surrogate pair at character {error.start}; write the character"
        ) from None
    return text
