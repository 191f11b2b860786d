"""What is measured: sizes, filters, the shape of the distribution, and inputs made from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("peaked", "broad", "flat")


@dataclass(frozen=True)
class Work:
    """One piece of work."""

    vocabulary: int
    tokens: int
    dtype: str = "fp32"
    kind: str = "peaked"
    top_k: int | None = None
    top_p: float = 1.0
    entropy: bool = False

    hidden: int = 0
    """Hidden size of the head whose product is part of the work; 0: logits are given."""

    response: float = 1.0
    """Share of the tokens that have a target."""

    @property
    def filters(self) -> bool:
        return self.top_k is not None or self.top_p < 1

    @property
    def label(self) -> str:
        parts = [f"top_k {self.top_k}"] if self.top_k else []
        parts += [f"top_p {self.top_p}"] if self.top_p < 1 else []
        return (" + ".join(parts) or "no filter") + (", entropy" if self.entropy else "")

    def logits_mib(self, ranks: int = 1) -> float:
        """Size of a rank's logits."""
        return self.tokens * -(-self.vocabulary // ranks) * DTYPES[self.dtype].itemsize / 2**20


@dataclass(frozen=True)
class Inputs:
    """One rank's tensors."""

    tensors: tuple[Tensor, ...]
    """Logits ``[T, V/TP]``, or hidden states ``[T, H]`` and the head's weight ``[V/TP, H]``."""

    targets: Tensor

    def fresh(self) -> tuple[Tensor, ...]:
        """Tensors of a graph: logits as a module has just computed them; a weight with room for its gradient."""
        leaves = tuple(t.detach().requires_grad_() for t in self.tensors)
        if len(leaves) == 1:
            return (leaves[0] * 1.0,)
        leaves[1].main_grad = torch.full_like(self.tensors[1], 0.0)
        return leaves


def make_inputs(work: Work, rank: int = 0, ranks: int = 1, device: torch.device | str = "cpu") -> Inputs:
    """The same work on every rank, cut along the vocabulary."""
    if work.hidden:
        return _head_inputs(work, rank, ranks)
    logits = make_logits(work, device)
    targets = logits.float().topk(3, -1).indices[:, 1].contiguous()
    targets[round(work.tokens * work.response) :] = -1
    columns = -(-work.vocabulary // ranks)
    padded = torch.nn.functional.pad(logits, (0, columns * ranks - work.vocabulary))
    return Inputs((padded[:, columns * rank : columns * (rank + 1)].clone(),), targets)


def make_logits(work: Work, device: torch.device | str = "cpu") -> Tensor:
    """Peaked: a few tokens hold the mass. Broad: about two thousand do. Flat: nearly all do."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (work.tokens, work.vocabulary)
    logits = torch.randn(shape, generator=generator, device=device)
    if work.kind == "peaked":
        spikes = torch.randint(0, work.vocabulary, (work.tokens, 24), generator=generator, device=device)
        heights = torch.rand(spikes.shape, generator=generator, device=device) * 6 + 10
        logits = logits.mul_(2).scatter_add_(1, spikes, heights)
    elif work.kind == "broad":
        logits.mul_(3.5)
    return logits.to(DTYPES[work.dtype])


def _head_inputs(work: Work, rank: int, ranks: int) -> Inputs:
    """Hidden states and a weight whose logits are peaked, and targets inside their supports."""
    generator = torch.Generator().manual_seed(0)
    columns = -(-work.vocabulary // ranks)
    weight = torch.randn(columns * ranks, work.hidden, generator=generator)
    targets = torch.randint(0, work.vocabulary, (work.tokens,), generator=generator)
    hidden = weight[targets] * (14 / work.hidden) + torch.randn(work.tokens, work.hidden, generator=generator) * 0.03
    targets[round(work.tokens * work.response) :] = -1
    dtype = DTYPES[work.dtype]
    return Inputs((hidden.to(dtype), weight[columns * rank : columns * (rank + 1)].to(dtype).clone()), targets)
