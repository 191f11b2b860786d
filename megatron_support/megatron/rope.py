"""Rotary frequencies, with Llama 3's scaling for long contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_support.errors import ConfigurationError

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rotary_frequencies(base: float, size: int, scaling: Mapping[str, float | int | str] | None) -> Tensor:
    """Angle per position of each pair of a head: fp32 ``[size / 2]``.

    Formula: ``base ** (-2 i / size)``, divided by :func:`llama3_divisors` where ``scaling`` is given.

    Args:
        base: RoPE base.
        size: head size.
        scaling: Hugging Face's ``rope_scaling`` of type llama3, or None.

    Raises:
        ConfigurationError: another type of scaling, or a number of it is missing.
    """
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return frequencies if scaling is None else frequencies / llama3_divisors(base, size, scaling)


def llama3_divisors(base: float, size: int, scaling: Mapping[str, float | int | str]) -> Tensor:
    """What Llama 3.1 divides each frequency by: 1 for short wavelengths, ``factor`` for long ones, smooth between.

    Formula: with wavelength w and original context c, ``s = (c / w - low) / (high - low)`` clamped to [0, 1]; the
    scaled frequency is ``(1 - s) f / factor + s f``.

    Returns:
        fp32 ``[size / 2]``.
    """
    kind = scaling.get("rope_type", scaling.get("type"))
    missing = [name for name in _LLAMA3 if not isinstance(scaling.get(name), (int, float))]
    if kind != "llama3" or missing:
        raise ConfigurationError(
            f"model.architecture.rope_scaling must have rope_type llama3 and the numbers {', '.join(_LLAMA3)}, "
            f"got {dict(scaling)}; correct it, or use null for none"
        )
    factor, low, high, context = (float(scaling[name]) for name in _LLAMA3)
    frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    periods = context * frequencies / (2 * math.pi)  # of the wave in the original context
    smooth = ((periods - low) / (high - low)).clamp(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
