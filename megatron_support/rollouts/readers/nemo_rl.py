"""NeMo-RL: ``train_data_step<N>.jsonl``, written by ``grpo.py`` through ``Logger.log_batched_dict_as_jsonl``.

A line is a batch of one, so every field but ``idx`` is a list of length 1. Token fields are padded to the longest
sequence of the batch. Entry t of a log-probability is about token t. Sampling parameters and prompt groups are not in
the file. ``mask_out_neg_inf_logprobs`` has replaced -inf in ``prev_logprobs`` by 0, so which tokens were outside the
trainer's support is lost.

Read from NVIDIA-NeMo/RL 7ea279abfbeb698b092856d0dab61e7cf39bc909: nemo_rl/algorithms/grpo.py, nemo_rl/utils/logger.py,
nemo_rl/algorithms/utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_support.rollouts.fields import at_place, listed
from megatron_support.rollouts.readers.common import (
    Assumptions,
    Reading,
    flags,
    integer,
    json_lines,
    mapping,
    prompt_id,
    sampling_of,
)

_TOKEN_COLUMNS = ("generation_logprobs", "prev_logprobs", "advantages")


def looks_like(first: Mapping[str, Any]) -> bool:
    """Whether the first row of a JSONL file is one of this format."""
    return {"token_loss_mask", "token_ids", "input_lengths"} <= first.keys()


def read(path: Path, assumptions: Assumptions) -> Reading:
    """Read a file."""
    reading = Reading(
        rows=iter(()),
        names={
            "tokens": "token_ids",
            "response_mask": "token_loss_mask",
            "sample_mask": "sample_loss_mask",
            "reward": "rewards",
            "id": "idx",
        },
        unknown=frozenset({"prev_logprobs"}),
        notes=["groups: not in the file; rows with the same prompt tokens are one"],
    )
    reading.rows = _rows(path, assumptions, reading)
    return reading


def _rows(path: Path, assumptions: Assumptions, reading: Reading) -> Iterator[tuple[str, Any]]:
    zeros = 0
    for place, data in json_lines(path):
        row = at_place(place, partial(_row, data, assumptions), reading.names)
        pairs = zip(row["prev_logprobs"], row["response_mask"], strict=True)
        zeros += sum(1 for value, is_response in pairs if is_response and value == 0)
        yield place, row
    reading.notes.append(
        f"prev_logprobs: which tokens were outside the support is lost; {zeros} response tokens hold the 0.0 that "
        "NeMo-RL writes for -inf (megatron-support score computes them anew)"
    )


def _row(data: Any, assumptions: Assumptions) -> dict[str, Any]:
    data = mapping(data)
    tokens = listed(_one(data, "token_ids"), "token_ids", None)
    length = integer(_one(data, "input_lengths"), "input_lengths", least=1, most=len(tokens))
    mask = flags(_one(data, "token_loss_mask"), "token_loss_mask", len(tokens))
    reward = "filtered_rewards" if data.get("filtered_rewards") is not None else "rewards"
    (sample_mask,) = flags(data, "sample_loss_mask", 1)
    return {
        "id": data.get("idx"),
        "prompt_id": prompt_id(tokens, mask),
        "tokens": tokens[:length],
        "response_mask": mask[:length],
        **{name: listed(_one(data, name), name, len(tokens))[:length] for name in _TOKEN_COLUMNS},
        "reward": _one(data, reward)[reward],
        "sample_mask": sample_mask,
        "sampling": sampling_of(assumptions),
    }


def _one(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The single entry of a field, under its name."""
    return {name: listed(data, name, 1)[0]}
