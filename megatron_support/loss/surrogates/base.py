"""What a surrogate is given and what it returns, and the registry of surrogates by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_support.config.loss import BUILT_IN_SURROGATES, declare_surrogate
from megatron_support.errors import ConfigurationError
from megatron_support.loss.masks import Selection


@dataclass(frozen=True, kw_only=True)
class SurrogateInputs:
    """Sanitised per-token tensors, all of one shape and finite unless the data has a fault.

    At a token that does not take part: log_ratio 0, ratio 1, log-probabilities 0, advantage 0.
    """

    log_ratio: Tensor
    """log p - log p_prev of the token or of its sequence (ratio_level), in [-20, 20]; carries gradient."""
    ratio: Tensor
    """exp(log_ratio); carries gradient."""
    advantages: Tensor
    selection: Selection
    """Keeps values of tokens that take part; ``selection.mask`` is that mask."""
    raw_curr_logprobs: Tensor
    raw_prev_logprobs: Tensor
    sequence_mean: Callable[[Tensor], Tensor]
    """Mean over the surviving tokens of each sequence, seen by each of its tokens; differentiable, and right under
    context parallelism. Its argument must be 0 where the mask is False."""

    @property
    def curr_logprobs(self) -> Tensor:
        """log p of the token; carries gradient. Selected on each access."""
        return self.selection(self.raw_curr_logprobs)

    @property
    def prev_logprobs(self) -> Tensor:
        """log p_prev of the token; no gradient. Selected on each access."""
        return self.selection(self.raw_prev_logprobs)


@dataclass(frozen=True, kw_only=True)
class PessimisticClip:
    """PPO's minimum clips above only where the advantage is positive, and below only where it is negative.

    ``clipped`` is then 0 at tokens that do not take part.
    """

    ratio: Tensor
    advantages: Tensor
    window: tuple[float, float]
    clipped: Tensor
    """As in :class:`SurrogateOutput`."""
    clipped_ratio: Tensor
    """``ratio`` clipped into ``window``."""

    def explains(self, output: SurrogateOutput, inputs: SurrogateInputs) -> bool:
        """Whether this is about what the output reports, which a caller of the surrogate may have replaced."""
        same = self.ratio is output.ratio and self.clipped is output.clipped and self.advantages is inputs.advantages
        return same and self.window == output.window


@dataclass(frozen=True, kw_only=True)
class SurrogateOutput:
    """A loss per token and what diagnostics report about it."""

    loss: Tensor
    """Per token; ignored at tokens that do not take part."""
    ratio: Tensor
    """What the loss is linear in before clipping: the ratio, or the log-probability. Reported only."""
    window: tuple[float, float] | None = None
    """The bounds that clip ``ratio``; None for no clipping."""
    clipped: Tensor | None = None
    """bool, or 0 and 1: tokens whose gradient a clip removed or whose ratio it changed."""
    bounded: Tensor | None = None
    """bool, tokens where a second bound applies (dual clip, ratio cap)."""
    zero_outside: bool = False
    """Whether the loss is 0 at every token that does not take part, as any multiple of the advantage is."""
    pessimistic: PessimisticClip | None = None
    """How ``clipped`` came about, which spares diagnostics some work; :func:`surrogate_loss` drops it where it is not
    about this output."""
    importance_ratio: Tensor | None = None
    """The detached ratio of the inputs; set by :func:`surrogate_loss`."""


SurrogateFunction = Callable[..., SurrogateOutput | Tensor]

SURROGATES: dict[str, SurrogateFunction] = {}


def register_surrogate(name: str) -> Callable[[SurrogateFunction], SurrogateFunction]:
    """Add a surrogate, usable as ``surrogate: {type: NAME, ...}``.

    The function is called as ``fn(inputs, **fields)`` with :class:`SurrogateInputs` and the fields of the
    configuration, and returns a per-token loss (to be minimised) or a :class:`SurrogateOutput`. Its keyword parameters
    are the allowed fields; one without a default is required. It must not read values on the host, must not write
    into its inputs, and must be finite at tokens that do not take part. Exclusion, correction, aggregation and
    normalisation happen around it.

    Example::

        @register_surrogate("squared_ratio")
        def squared_ratio(inputs: SurrogateInputs, *, strength: float = 0.5) -> Tensor:
            return -inputs.ratio * inputs.advantages + strength * inputs.log_ratio.square()

    Raises:
        ConfigurationError: the name is taken or not a word.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigurationError(f"a surrogate's name must be an identifier, got {name!r}; use letters and underscores")
    if name in SURROGATES and name in BUILT_IN_SURROGATES:
        raise ConfigurationError(f"surrogate {name!r} is built in; register yours under another name")

    def register(fn: SurrogateFunction) -> SurrogateFunction:
        known = SURROGATES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ConfigurationError(
                f"surrogate {name!r} is already registered by {known.__module__}.{known.__qualname__}; "
                "choose another name"
            )
        SURROGATES[name] = fn
        if name not in BUILT_IN_SURROGATES:
            declare_surrogate(name, fn)
        return fn

    return register


def surrogate_loss(name: str, inputs: SurrogateInputs, parameters: dict[str, Any]) -> SurrogateOutput:
    """Call the surrogate ``name``."""
    output = SURROGATES[name](inputs, **parameters)
    if not isinstance(output, SurrogateOutput):
        output = SurrogateOutput(loss=output, ratio=inputs.ratio.detach())
    clip = output.pessimistic
    if clip is not None and not clip.explains(output, inputs):  # a surrogate that builds on a built-in one
        output = replace(output, pessimistic=None, zero_outside=False)
    return replace(output, importance_ratio=inputs.ratio.detach())
