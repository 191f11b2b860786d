"""Small dumps in the formats of other programs: what each would write of the same two responses to one prompt.

Sample 0: prompt [11, 12], response [13, 14, 15], reward 1. Sample 1: prompt [11, 12], response [16, 17], reward 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT = [11, 12]
RESPONSES = [[13, 14, 15], [16, 17]]
GENERATION = [[-0.5, -1.25, -2.0], [-0.75, -3.5]]
PREVIOUS = [[-0.625, -1.5, -2.25], [-1.0, -4.0]]
ADVANTAGES = [0.5, -0.5]
REWARDS = [1.0, 0.0]
TOP_P_SETS = [[[13, 20], [14], [15, 21, 22]], [[16], [17, 23]]]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def nemo_rl_rows() -> list[dict[str, Any]]:
    """Token fields are padded to the longest sequence; every field but idx is a list of one."""
    rows = []
    for number, (response, generation, previous) in enumerate(zip(RESPONSES, GENERATION, PREVIOUS, strict=True)):
        padding = 3 - len(response)

        def padded(values: Sequence[float], padding: int = padding) -> list[float]:
            return [0.0, 0.0, *values, *[0.0] * padding]

        fields = {
            "content": "a prompt and a response",
            "rewards": REWARDS[number],
            "input_lengths": 2 + len(response),
            "token_ids": [*PROMPT, *response, *[0] * padding],
            "token_loss_mask": padded([1.0] * len(response)),
            "sample_loss_mask": 1.0,
            "advantages": padded([ADVANTAGES[number]] * len(response)),
            "generation_logprobs": padded(generation),
            "prev_logprobs": padded(previous),
        }
        rows.append({"idx": number, **{name: [value] for name, value in fields.items()}})
    return rows


def prime_rl_rows(*, rewards: bool = True) -> list[dict[str, Any]]:
    rows = []
    for number, (response, generation, current) in enumerate(zip(RESPONSES, GENERATION, PREVIOUS, strict=True)):
        length = 2 + len(response)
        rows.append(
            {
                "schema_version": 1,
                "step": 3,
                "export_step": 3,
                "rank": 0,
                "micro_step": 0,
                "micro_sequence_idx": number,
                "export_sequence_idx": number,
                "run_id": None,
                "env_name": "math",
                "token_ids": [*PROMPT, *response],
                "position_ids": list(range(length)),
                "loss_mask": [False, False, *[True] * len(response)],
                "advantages": [ADVANTAGES[number]] * length,
                "inference_logprobs": [0.0, 0.0, *generation],
                "trainer_logprobs": [None, -3.0, *current],
                "entropy": [1.5] * length,
                "mismatch_kl": [None] * length,
                **({"rewards": [REWARDS[number]] * length} if rewards else {}),
            }
        )
    return rows


def slime_rollout() -> dict[str, Any]:
    """``--save-debug-rollout-data``."""
    samples = []
    for number, (response, generation, sets) in enumerate(zip(RESPONSES, GENERATION, TOP_P_SETS, strict=True)):
        sizes = np.cumsum([0, *map(len, sets)]).tolist()
        samples.append(
            {
                "index": 40 + number,
                "group_index": 20,
                "prompt": "a prompt",
                "response": f"response {number}",
                "tokens": [*PROMPT, *response],
                "response_length": len(response),
                "reward": REWARDS[number],
                "loss_mask": None,
                "rollout_log_probs": list(generation),
                "rollout_top_p_token_ids": torch.tensor([i for kept in sets for i in kept], dtype=torch.int32),
                "rollout_top_p_token_offsets": torch.tensor(sizes, dtype=torch.int32),
                "remove_sample": number == 1,
                "metadata": {"source": "somewhere"},
                "status": "completed",
            }
        )
    return {"rollout_id": 7, "samples": samples}


def slime_train() -> dict[str, Any]:
    """``--save-debug-train-data``."""
    samples = [
        {
            "sample_index": 40 + number,
            "tokens": torch.tensor([*PROMPT, *response]),
            "response_lengths": len(response),
            "loss_masks": torch.ones(len(response), dtype=torch.int32),
            "rollout_log_probs": torch.tensor(generation),
            "log_probs": torch.tensor(previous),
            "advantages": torch.full((len(response),), ADVANTAGES[number]),
            "rewards": ADVANTAGES[number],
        }
        for number, (response, generation, previous) in enumerate(zip(RESPONSES, GENERATION, PREVIOUS, strict=True))
    ]
    return {
        "format_version": 2,
        "rollout_id": 7,
        "samples": samples,
        "raw_reward": list(REWARDS),
        "dp_shards": [[0, 1]],
    }


def skyrl_batch() -> dict[str, torch.Tensor]:
    """Padded on the left; response tensors cover the last three positions."""

    def left(values: Sequence[float], width: int, fill: float = 0) -> list[float]:
        return [fill] * (width - len(values)) + list(values)

    return {
        "sequences": torch.tensor([left([*PROMPT, *response], 5) for response in RESPONSES], dtype=torch.int64),
        "attention_mask": torch.tensor([left([1] * (2 + len(r)), 5) for r in RESPONSES]),
        "response_mask": torch.tensor([left([1] * len(r), 3) for r in RESPONSES]),
        "loss_mask": torch.tensor([left([1.0] * len(r), 3) for r in RESPONSES]),
        "rollout_logprobs": torch.tensor([left(values, 3) for values in GENERATION]),
        "action_log_probs": torch.tensor([left(values, 3) for values in PREVIOUS]),
        "advantages": torch.tensor([left([ADVANTAGES[n]] * len(r), 3) for n, r in enumerate(RESPONSES)]),
    }


def bank_group(uid: str = "gen-000003/0") -> dict[str, Any]:
    """A group of both samples; a member's turns are those of one conversation."""
    return {
        "uid": uid,
        "reward": list(REWARDS),
        "turns": [[[*PROMPT, *response]] for response in RESPONSES],
        "masks": [[[0, 0, *[1] * len(response)]] for response in RESPONSES],
        "logprobs": [[list(values)] for values in GENERATION],
    }


def write_bank(folder: Path, groups: Sequence[Mapping[str, Any]] = ()) -> Path:
    """A rollout bank of one segment."""
    segment = folder / "generations/generation-0a1b/gen-000003"
    segment.mkdir(parents=True, exist_ok=True)
    manifest = {"format_version": 2, "active_generation": "generation-0a1b", "segments": ["gen-000003"]}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    kinds = (
        ("tok", "turns", "tokens.bin", "<i4"),
        ("lp", "logprobs", "logprobs.bin", "<f2"),
        ("mask", "masks", "masks.bin", "u1"),
    )
    files = {name: b"" for _, _, name, _ in kinds}
    lines = []
    for group in groups or [bank_group()]:
        record: dict[str, Any] = {
            "format_version": 2,
            "uid": group["uid"],
            "collection_iter": 3,
            "member_type": "TokenRollout",
            "kind": "token",
            "group": {"rollouts": [{"reward": reward, "env_id": "math"} for reward in group["reward"]]},
        }
        slices = []
        for key, source, name, dtype in kinds:
            content = np.array([v for member in group[source] for turn in member for v in turn], dtype=dtype).tobytes()
            lengths = [[len(turn) for turn in member] for member in group[source]]
            record[key] = {"offset": len(files[name]), "bytes": len(content), "lengths": lengths}
            files[name] += content
            slices.append(content)
        lines.append({**record, "checksum": bank_checksum(record, slices)})
    write_lines(segment / "ledger.log", lines)
    for name, content in files.items():
        (segment / name).write_bytes(content)
    return folder


def bank_checksum(record: Mapping[str, Any], slices: Sequence[bytes]) -> str:
    signed = json.dumps({k: v for k, v in record.items() if k != "checksum"}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(signed.encode() + b"".join(slices), digest_size=16).hexdigest()


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "nemo_rl": lambda folder: write_lines(folder / "train_data_step3.jsonl", nemo_rl_rows()),
    "prime_rl": lambda folder: write_lines(folder / "rank_0.jsonl", prime_rl_rows()),
    "slime": lambda folder: save(folder / "rollout_7.pt", slime_rollout()),
    "slime_train": lambda folder: save(folder / "train_7.pt", slime_train()),
    "skyrl": lambda folder: save(folder / "batch.pt", skyrl_batch()),
    "megatron_bank": lambda folder: write_bank(folder / "bank"),
}
"""Each format's dump, written into a folder."""
