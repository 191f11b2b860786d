"""Replaying a support: the trainer renormalises over the set that the sampler kept, so no sampled token is lost.

python examples/replay_support.py
"""

from __future__ import annotations

import torch

from megatron_support import RolloutSupport, SamplingParams, support_logprobs


def kept_by(logits: torch.Tensor, top_p: float) -> RolloutSupport:
    """What an engine exports: for each token the ids that its nucleus filter kept, end to end."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    above = probabilities.cumsum(-1) - probabilities  # the mass strictly above each token
    sets = [ids[mass < top_p] for ids, mass in zip(order, above, strict=True)]
    sizes = torch.tensor([0, *map(len, sets)])
    return RolloutSupport(torch.cat(sets), sizes.cumsum(0))


def main() -> None:
    torch.manual_seed(0)
    engine = 2 * torch.randn(2000, 200)
    trainer = engine + 0.05 * torch.randn_like(engine)  # another program, other rounding
    kept = kept_by(engine, top_p=0.9)
    draw = (torch.rand(2000) * kept.offsets.diff()).long()
    sampled = kept.token_ids[kept.offsets[:-1] + draw]  # any token of its set, so that the boundary is seen often

    sampling = SamplingParams(top_p=0.9)
    recomputed = support_logprobs(trainer, sampled, sampling)
    replayed = support_logprobs(trainer, sampled, sampling, support=kept)
    print(f"outside the support, recomputed: {int((~recomputed.in_support).sum())} of {len(sampled)} tokens")
    print(f"outside the support, replayed:   {int((~replayed.in_support).sum())} of {len(sampled)} tokens")
    shared = recomputed.in_support
    gap = (recomputed.filtered - replayed.filtered)[shared].abs().mean()
    print(f"mean difference at the others:   {gap:.4f} nats")


if __name__ == "__main__":
    main()
