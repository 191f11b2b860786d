"""slime: ``--save-debug-rollout-data`` and ``--save-debug-train-data``, both ``torch.save`` of a dict with ``samples``.

A rollout dump is ``{"rollout_id", "samples": [Sample.to_dict()]}``. A train dump (``format_version`` 2) has the
training columns of each sample under their plural names, a ``raw_reward`` for all samples in rollout order, and
``dp_shards``.
Log-probabilities cover the response alone. A kept set of response token i is
``rollout_top_p_token_ids[offsets[i]:offsets[i + 1]]``. Sampling parameters are not in the file. slime itself reads the
files with a full unpickler; here they are read as plain values and tensors.

Read from THUDM/slime 624b824a898ab0ec1fcb4d373004c7f3852bf515: slime/observability/rollout_data_utils.py,
slime/observability/train_data_utils.py, slime/utils/types.py, slime/ray/rollout.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import FieldError, at_place, listed, required, short
from megatron_support.rollouts.readers.common import (
    Assumptions,
    Reading,
    flags,
    integer,
    mapping,
    on_response,
    prompt_id,
    sampling_of,
)
from megatron_support.rollouts.readers.torch_file import plain

TRAIN_VERSION = 2

_RESPONSE_COLUMNS = {
    "prev_logprobs": "log_probs",
    "reference_logprobs": "ref_log_probs",
    "teacher_logprobs": "teacher_log_probs",
    "values": "values",
    "advantages": "advantages",
}


def looks_like(content: Any) -> bool:
    """Whether the content of a ``.pt`` file is one of this format."""
    return isinstance(content, Mapping) and "samples" in content


def read(path: Path, content: Any, assumptions: Assumptions) -> Reading:
    """Read the content of a file."""
    samples = mapping(content).get("samples")
    if not isinstance(samples, list):
        raise RolloutError(f"{path}: samples: must be a list, got {short(samples)}; give a debug dump of slime")
    train = "format_version" in content
    version = content.get("format_version")
    if train and not (type(version) is int and version == TRAIN_VERSION):
        raise RolloutError(
            f"{path}: format_version: must be {TRAIN_VERSION}, got {short(version)}; "
            "write it with the slime that this reader knows"
        )
    reading = Reading(
        rows=iter(()),
        names={
            "generation_logprobs": "rollout_log_probs",
            "response_mask": "loss_masks" if train else "loss_mask",
            "reward": "raw_reward or rewards" if train else "reward",
            "support": "rollout_top_p_token_ids",
            "support.offsets": "rollout_top_p_token_offsets",
            **(_RESPONSE_COLUMNS if train else {}),
        },
    )
    if train:
        reading.notes.append("groups: not in the file; rows with the same prompt tokens are one")
    reading.rows = _rows(path, content, train, assumptions, reading)
    return reading


def _rows(
    path: Path, content: Mapping[str, Any], train: bool, assumptions: Assumptions, reading: Reading
) -> Iterator[tuple[str, Any]]:
    raw = plain(path, content.get("raw_reward"), "raw_reward")
    if train and not (isinstance(raw, list) and len(raw) == len(content["samples"])):
        reading.notes.append("reward: the file has no raw_reward of every sample; rewards as normalised for training")
        raw = None
    budget = path.stat().st_size
    for number, sample in enumerate(content["samples"], start=1):
        place = f"{path}:sample {number}"
        reward = raw[number - 1] if train and raw is not None else None
        convert = partial(_row, path, place, sample, number, reward, train, assumptions)
        row = at_place(place, convert, reading.names)
        budget -= len(row["tokens"]) + len((row["support"] or {}).get("token_ids", ()))
        if budget < 0:  # one list, referred to again and again
            raise RolloutError(
                f"{place}: tokens: more in all, with kept sets, than the file has bytes; write the file again"
            )
        yield place, row


def _row(
    path: Path, place: str, sample: Any, number: int, raw: Any, train: bool, assumptions: Assumptions
) -> dict[str, Any]:
    data = {
        key: plain(path, value, f"{place}: {key}") for key, value in mapping(sample).items() if isinstance(key, str)
    }
    tokens = listed(data, "tokens", None)
    response = integer(data, "response_lengths" if train else "response_length", most=len(tokens))
    masks = "loss_masks" if train else "loss_mask"
    kept = [1] * response if data.get(masks) is None else flags(data, masks, response)
    mask = [0] * (len(tokens) - response) + kept
    removed = bool(data.get("remove_sample", False))
    index = "sample_index" if train else "index"
    columns = {ours: theirs for ours, theirs in _RESPONSE_COLUMNS.items() if train or theirs == "teacher_log_probs"}
    given = {ours: theirs for ours, theirs in columns.items() if data.get(theirs) is not None}
    group = None if train else data.get("group_index")
    return {
        "id": str(number - 1 if data.get(index) is None else integer(data, index)),
        "prompt_id": prompt_id(tokens, mask) if group is None else integer(data, "group_index"),
        "prompt": data["prompt"] if isinstance(data.get("prompt"), str) else "",
        "response": data["response"] if isinstance(data.get("response"), str) else "",
        "tokens": tokens,
        "response_mask": mask,
        "generation_logprobs": on_response(listed(data, "rollout_log_probs", response), len(tokens)),
        **{ours: on_response(listed(data, theirs, response), len(tokens)) for ours, theirs in given.items()},
        "reward": _reward(data, train, raw, assumptions),
        "sample_mask": not removed,
        "sampling": sampling_of(assumptions),
        "support": _support(data, len(tokens) - response, response),
    }


def _reward(data: Mapping[str, Any], train: bool, raw: Any, assumptions: Assumptions) -> Any:
    value = raw if raw is not None else data.get("rewards" if train else "reward")
    if not isinstance(value, Mapping):
        return value
    if assumptions.reward_key is None:
        raise FieldError(f"reward: several by name {short(list(value))}; choose one with --reward-key")
    return required(value, assumptions.reward_key, (int, float), "a number", "reward.")


def _support(data: Mapping[str, Any], prompt: int, response: int) -> dict[str, list[Any]] | None:
    """Kept sets of all tokens: none at the prompt."""
    if data.get("rollout_top_p_token_offsets") is None:
        return None
    ids = listed(data, "rollout_top_p_token_ids", None)
    offsets = listed(data, "rollout_top_p_token_offsets", response + 1)
    return {"token_ids": ids, "offsets": [0] * prompt + offsets}
