"""What slime does around its custom functions, from its documented contract: batches, cuts, reducer, outer scaling.

Not slime's code: a stand-in, written from the shapes and factors of THUDM/slime at commit 624b824a.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor

VOCAB = 23


def arguments(**changes: Any) -> Namespace:
    """slime's options that the adapter reads, with slime's defaults."""
    defaults: dict[str, Any] = {
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
        "eps_clip": 0.2,
        "eps_clip_high": None,
        "eps_clip_c": None,
        "entropy_coef": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "use_unbiased_kl": False,
        "kl_coef": 0.0,
        "gamma": 1.0,
        "lambd": 1.0,
        "use_tis": False,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "use_opsm": False,
        "opsm_delta": 1e-4,
        "rollout_temperature": 1.0,
        "rollout_top_k": -1,
        "rollout_top_p": 1.0,
        "vocab_size": VOCAB,
        "allgather_cp": False,
    }
    assert not set(changes) - set(defaults)
    return Namespace(**{**defaults, **changes})


def here(total: int, response: int, context: int, rank: int) -> list[int]:
    """Indices, in a sample's response, of the tokens that a context-parallel rank predicts."""
    first = total - response - 1
    if context == 1:
        return list(range(response))
    chunk = -(-total // (2 * context))
    rows = [row for part in (rank, 2 * context - 1 - rank) for row in range(part * chunk, (part + 1) * chunk)]
    return [row - first for row in rows if first <= row < total - 1]


def packed(batch: dict[str, Any], context: int, rank: int, *, pad: int = 3) -> Tensor:
    """Token ids ``[1, T]`` of a rank's logits: each sample cut into zigzag chunks, and padding at the end."""
    pieces = []
    for tokens in batch["unconcat_tokens"]:
        if context > 1:
            chunk = -(-len(tokens) // (2 * context))
            tokens = torch.nn.functional.pad(tokens, (0, 2 * context * chunk - len(tokens)))
            chunks = tokens.split(chunk)
            tokens = torch.cat([chunks[rank], chunks[2 * context - 1 - rank]])
        pieces.append(tokens)
    return torch.cat([*pieces, torch.zeros(pad, dtype=torch.int64)])[None]


def local(batch: dict[str, Any], context: int, rank: int) -> dict[str, Any]:
    """The batch as a context-parallel rank gets it: per-token lists cut, masks and token sets whole."""
    cut = dict(batch)
    lengths = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        if batch.get(name) is not None:
            cut[name] = [
                values[here(*length, context, rank)] for values, length in zip(batch[name], lengths, strict=True)
            ]
    return cut


def reducer(batch: dict[str, Any], per_token: bool, context: int = 1, rank: int = 0):
    """slime's ``sum_of_sample_mean``: of this rank's tokens, each over its rollout's mask sum, or a plain sum."""
    lengths = zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    indices = [here(*length, context, rank) for length in lengths]
    weights = [
        mask[index].double() / (1 if per_token else max(float(total), 1))
        for mask, index, total in zip(batch["loss_masks"], indices, batch["rollout_mask_sums"], strict=True)
    ]
    return lambda values: (values * torch.cat(weights).to(values.dtype)).sum()


def outer(loss: Tensor, batch: dict[str, Any], *, per_token: bool, microbatches: int, batch_size: int, groups):
    """What slime returns to Megatron: (scaled loss, normaliser)."""
    if per_token:
        tokens = sum(max(int(mask.sum()), 1) for mask in batch["loss_masks"])
        return loss * groups.context_size, torch.tensor(tokens, dtype=torch.int)
    return loss * microbatches / batch_size * groups.data_context_size, torch.tensor(1, dtype=torch.int)


def rollouts(samples: int = 8, *, seed: int = 0) -> dict[str, Any]:
    """Samples of several lengths: holes in the mask, one masked whole, tokens outside the support in each tensor."""
    g = torch.Generator().manual_seed(seed)
    batch: dict[str, Any] = {
        name: []
        for name in (
            "unconcat_tokens",
            "total_lengths",
            "response_lengths",
            "loss_masks",
            "log_probs",
            "rollout_log_probs",
            "ref_log_probs",
            "advantages",
            "rollout_top_p_token_ids",
            "rollout_top_p_token_offsets",
        )
    }
    for sample in range(samples):
        prompt, response = int(torch.randint(1, 6, (), generator=g)), int(torch.randint(2, 11, (), generator=g))
        tokens = torch.randint(0, VOCAB, (prompt + response,), generator=g)
        mask = (torch.rand(response, generator=g) < 0.8).long()
        mask[-1] = 1
        if sample == 3:
            mask[:] = 0
        old = -3 + 0.5 * torch.rand(response, generator=g)
        engine = old + 0.3 * torch.randn(response, generator=g).clamp(-1, 1)
        old[torch.rand(response, generator=g) < 0.15] = -torch.inf
        engine[torch.rand(response, generator=g) < 0.1] = -torch.inf
        sets = []
        for token in tokens[-response:].tolist():
            others = torch.randperm(VOCAB, generator=g)[:6].tolist()
            of_a_tool = float(torch.rand((), generator=g)) < 0.15  # no sampler chose it: an empty set, no filter
            sets.append([] if of_a_tool else sorted({*others, token}))
        batch["unconcat_tokens"].append(tokens)
        batch["total_lengths"].append(prompt + response)
        batch["response_lengths"].append(response)
        batch["loss_masks"].append(mask)
        batch["log_probs"].append(old)
        batch["rollout_log_probs"].append(engine)
        batch["ref_log_probs"].append(-3 + 0.5 * torch.rand(response, generator=g))
        batch["advantages"].append(torch.randn((), generator=g) * torch.ones(response))
        batch["rollout_top_p_token_ids"].append([token for kept in sets for token in kept])
        batch["rollout_top_p_token_offsets"].append(
            torch.tensor([0, *[len(kept) for kept in sets]], dtype=torch.int32).cumsum(0)
        )
    batch["rollout_mask_sums"] = [mask.sum() for mask in batch["loss_masks"]]
    return batch


def take(batch: dict[str, Any], samples: range) -> dict[str, Any]:
    """Some samples of a batch."""
    return {name: [values[sample] for sample in samples] for name, values in batch.items()}


def kept_ids(batch: dict[str, Any], sample: int) -> list[list[int]]:
    """The recorded set of each response token of a sample."""
    ids, offsets = batch["rollout_top_p_token_ids"][sample], batch["rollout_top_p_token_offsets"][sample].tolist()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def reference_logprobs(table: Tensor, batch: dict[str, Any], args: Namespace, *, replay: bool) -> dict[str, Tensor]:
    """Filtered and unfiltered log-probabilities and entropy of all response tokens, plainly, differentiable.

    The model is a table: the logits after token t are its row.
    """
    filtered, unfiltered, entropy = [], [], []
    for sample, tokens in enumerate(batch["unconcat_tokens"]):
        response = batch["response_lengths"][sample]
        logits = table[tokens[-response - 1 : -1]] / args.rollout_temperature
        targets = tokens[-response:]
        keep = torch.ones_like(logits, dtype=torch.bool)
        if replay:
            keep[:] = False
            for row, ids in enumerate(kept_ids(batch, sample)):
                keep[row, ids or slice(None)] = True
        elif args.rollout_top_k > 0:
            keep = logits >= logits.topk(args.rollout_top_k, -1).values[:, -1:]
        plain = logits.log_softmax(-1)
        inside = keep.gather(-1, targets[:, None])[:, 0]
        norm = logits.masked_fill(~keep, -torch.inf).logsumexp(-1)
        chosen = logits.gather(-1, targets[:, None])[:, 0]
        filtered.append(torch.where(inside, chosen - norm, -torch.inf))
        unfiltered.append(plain.gather(-1, targets[:, None])[:, 0])
        entropy.append(-(plain.exp() * plain).sum(-1))
    return {"filtered": torch.cat(filtered), "unfiltered": torch.cat(unfiltered), "entropy": torch.cat(entropy)}
