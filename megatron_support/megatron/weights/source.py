"""Where weights come from: anything that gives one full tensor by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megatron_support.config.recipe import Architecture
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.weights.names import tensor_shapes


class WeightSource(Protocol):
    """Full tensors under the names of :mod:`megatron_support.megatron.weights.names`, read one at a time."""

    @property
    def origin(self) -> str:
        """What to call it in an error: a file or a folder."""
        ...

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, on the host.

        Raises:
            ConfigurationError: there is none of that name.
        """
        ...


class RandomSource:
    """Fresh weights: N(0, 0.02^2); 0.02 / sqrt(2 L) for the two projections back into the residual; norms 1, biases 0.

    Each tensor is drawn at full size from a generator of its own, seeded by ``seed`` and its name, so a model has the
    same weights whatever its tensor- and pipeline-parallel layout.

    Args:
        architecture: shapes.
        seed: the recipe's.
        std: standard deviation.
    """

    def __init__(self, architecture: Architecture, seed: int, *, std: float = 0.02) -> None:
        self._shapes = tensor_shapes(architecture)
        self._seed = seed
        self._std = std
        self._residual_std = std / math.sqrt(2 * architecture.num_layers)

    @property
    def origin(self) -> str:
        return f"random weights with seed {self._seed}"

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        std = self._residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else self._std
        return torch.randn(shape, generator=generator) * std


def check_tensors(
    found: Mapping[str, tuple[int, ...]], architecture: Architecture, *, origin: str, ignorable: Collection[str] = ()
) -> None:
    """Check that a file has exactly the tensors of the architecture, in its shapes.

    Args:
        found: names and shapes in the file.
        architecture: read from the same file.
        origin: file or folder, for the message.
        ignorable: names that may be there and are not read.

    Raises:
        ConfigurationError: naming up to three tensors that are missing, unknown or of another shape.
    """
    wanted = tensor_shapes(architecture)
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted and name not in ignorable]
    wrong = [
        f"{name} {found[name]} instead of {shape}" for name, shape in wanted.items() if found.get(name, shape) != shape
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("not of this architecture", unknown), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise ConfigurationError(
            f"{origin}: tensors must be those of a dense Llama, Qwen2 or Qwen3 decoder with the file's own settings; "
            f"{'; '.join(problems)}; use a complete, unmodified checkpoint of such a model"
        )
