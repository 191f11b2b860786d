"""SkyRL: ``dumped_data/global_step_<N>_training_input.pkl``, a pickle, which is refused, and its safe form.

Unpickling runs what the file says, so a ``.pkl`` is never opened here. Where SkyRL is installed and the file is
trusted, :data:`REMEDY` turns it into a ``.pt`` file of plain tensors, which this reader reads: ``TrainingInputBatch``
as a dict of tensors padded on the left, ``sequences [B, S]`` and response tensors ``[B, R]`` that cover the last R
tokens. Rewards, prompt groups and sampling parameters are not in the dump.

Read from NovaSky-AI/SkyRL a9564572eb8e91076be43c1bd5e4615e3de17265: skyrl/train/trainer.py,
skyrl/backends/skyrl_train/training_batch.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_support.errors import RolloutError
from megatron_support.rollouts.fields import FieldError, at_place, listed
from megatron_support.rollouts.readers.common import Assumptions, Reading, flags, on_response, prompt_id, sampling_of
from megatron_support.rollouts.readers.torch_file import plain

REMEDY = (
    'where SkyRL is installed and if you trust the file, run: python -c "import pickle, sys, torch; '
    "batch = pickle.load(open(sys.argv[1], 'rb')); "
    'torch.save({k: v for k, v in batch.items() if torch.is_tensor(v)}, sys.argv[2])" IN.pkl OUT.pt'
)

_COLUMNS = {
    "generation_logprobs": "rollout_logprobs",
    "prev_logprobs": "action_log_probs",
    "reference_logprobs": "base_action_log_probs",
    "values": "values",
    "advantages": "advantages",
}
_NEEDED = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")


def looks_like(content: Any) -> bool:
    """Whether the content of a ``.pt`` file is one of this format."""
    return isinstance(content, Mapping) and {"sequences", "attention_mask", "loss_mask"} <= content.keys()


def refuse(path: Path) -> NoReturn:
    """Refuse a pickle.

    Raises:
        RolloutError: always, with the way to convert it.
    """
    raise RolloutError(f"{path}: a pickle, which can run anything when it is opened, is not read; {REMEDY}")


def read(path: Path, content: Any, assumptions: Assumptions) -> Reading:
    """Read the content of a converted file."""
    reading = Reading(
        rows=iter(()),
        names={"tokens": "sequences", "response_mask": "loss_mask", **_COLUMNS},
        unknown=frozenset({"rewards"}),
        notes=[
            "rewards: taken out before the dump; 0 stands for each (the advantages are there)",
            "groups: not in the file; rows with the same prompt tokens are one",
        ],
    )
    reading.rows = _rows(path, content, assumptions, reading.names)
    return reading


def _rows(
    path: Path, content: Mapping[str, Any], assumptions: Assumptions, names: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    given = [name for name in (*_NEEDED, *_COLUMNS.values()) if content.get(name) is not None]
    for name in _NEEDED:
        if name not in given:
            raise RolloutError(f"{path}: {name}: required and missing; dump the whole batch, {REMEDY}")
    tensors = {name: content[name] for name in dict.fromkeys(given)}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 2 or len(value) != len(tensors["sequences"]):
            raise RolloutError(f"{path}: {name}: must be a tensor with a row for each sequence; write the file again")
    columns = {name: plain(path, value, name) for name, value in tensors.items()}
    for number in range(len(columns["sequences"])):
        place = f"{path}:row {number + 1}"
        data = {name: values[number] for name, values in columns.items()}
        yield place, at_place(place, partial(_row, data, number, assumptions), names)


def _row(data: Mapping[str, Any], number: int, assumptions: Assumptions) -> dict[str, Any]:
    width = len(data["sequences"])
    length = _right_aligned(flags(data, "attention_mask", width), "attention_mask")
    tokens = data["sequences"][width - length :]
    responses = flags(data, "response_mask", None)
    response = _right_aligned(responses, "response_mask", length)
    loss = flags(data, "loss_mask", len(responses))
    mask = [0] * (length - response) + loss[len(loss) - response :]
    columns = {
        ours: on_response(listed(data, theirs, len(responses))[len(responses) - response :], length)
        for ours, theirs in _COLUMNS.items()
        if theirs in data
    }
    return {
        "id": str(number),
        "prompt_id": prompt_id(tokens, mask),
        "tokens": tokens,
        "response_mask": mask,
        **columns,
        "reward": 0.0,
        "sampling": sampling_of(assumptions),
    }


def _right_aligned(mask: list[Any], name: str, most: int | None = None) -> int:
    """How many entries a mask that is zeros and then ones marks."""
    count = sum(1 for entry in mask if entry == 1)
    if mask != [0] * (len(mask) - count) + [1] * count:
        raise FieldError(f"{name}: must be zeros and then ones, padded on the left; write the file again")
    if most is not None and count > most:
        raise FieldError(f"{name}: must mark at most the {most} tokens of attention_mask, got {count}; correct it")
    return count
