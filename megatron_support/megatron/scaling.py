"""The scaling contract: what Megatron-Core does to a loss before it is a gradient, and the factor that makes the net 1.

Let M be the number of microbatches, D and C the data- and context-parallel sizes. The schedule
(``forward_step_calc_loss``) and the gradient reduction (DDP, ``finalize_model_grads``) turn a returned loss l into:

``(l, metrics)``, ``calculate_per_token_loss`` off
    l * C / M, averaged over D C ranks: **net 1 / (M D)**.
``(l, metrics)``, flag on
    l * C / M, summed over D C ranks: **net C / M**.
``(l, tokens, metrics)``, flag off
    l / (tokens * M), averaged over D C ranks: a mean of means, never used here.
``(l, tokens, metrics)``, flag on
    l, summed over D C ranks, divided by the total of tokens: **net 1 / total** (1 where the total is 0).

A local loss that is already divided by *global* counts needs a net factor of 1, so it is multiplied by
:func:`loss_factor` and returned as a 2-tuple. Only ``normalization: survivors`` differs: its denominator is known
after the last forward pass. It returns sums, and :func:`survivor_rescale` says what the gradients are still to be
multiplied by.

Auxiliary losses of experts never pass through a loss function. Their gradient enters in the router's backward pass,
times a scale that the schedule sets: C / M with the flag off, averaged over D C ranks, so **net 1 / (M D)**, whatever
is done to the actor's loss. With the flag on each is multiplied by the tokens of its microbatch and everything is
divided by the total of a 3-tuple. The actor's loss then goes as (l * total, tokens, metrics), with the tokens of the
microbatch, padding included: **net 1** for the actor, and for them Megatron's own. A rescale of all gradients would
change their scale, so ``survivors`` is refused with them.

The schedule scales in place: the tensor that is returned is not the one that is logged.
"""

from __future__ import annotations


def loss_factor(
    *, calculate_per_token_loss: bool, num_microbatches: int, data_parallel_size: int, context_parallel_size: int
) -> float:
    """The factor for a 2-tuple loss that is a local part of a globally normalised one.

    Args:
        calculate_per_token_loss: the flag of Megatron's TransformerConfig.
        num_microbatches: microbatches of this rank in the step.
        data_parallel_size: size of the data-parallel group without context parallelism.
        context_parallel_size: size of the context-parallel group.
    """
    if calculate_per_token_loss:
        return num_microbatches / context_parallel_size
    return float(num_microbatches * data_parallel_size)


def survivor_rescale(*, survivors: int, rollout_count: int, already_divided: bool) -> float:
    """What gradients of summed losses are still to be multiplied by under ``normalization: survivors``.

    Args:
        survivors: surviving tokens or sequences over all ranks.
        rollout_count: response tokens or valid sequences before exclusion; the denominator where nothing survived.
        already_divided: whether ``finalize_model_grads`` has divided by ``survivors`` (3-tuple, per-token mode). It
            leaves gradients alone where the total is 0.
    """
    if survivors > 0:
        return 1.0 if already_divided else 1.0 / survivors
    return 1.0 / rollout_count if rollout_count > 0 else 1.0
