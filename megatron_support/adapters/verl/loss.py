"""verl's policy loss by its registry's signature, and the whole actor loss of its workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import load_settings, raise_faults
from megatron_support.adapters.hooks import Hooks, host_module, symbol
from megatron_support.adapters.verl.options import LOSS_MODE, Divisors, divisors, filters, loss_config
from megatron_support.config.loss import ActorLossConfig
from megatron_support.errors import ConfigurationError
from megatron_support.loss import actor_loss
from megatron_support.metrics import Max, Mean, Min, Sum
from megatron_support.types import LossOutput

UNFILTERED = "log_probs_unfiltered"
"""Key of a model output beside ``log_probs``: under the temperature alone, for the KL term."""


def policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """``policy_support`` in verl's registry of policy losses: the policy term of one microbatch.

    verl has no argument for validity. What excludes a token must be in these tensors: -inf in ``old_log_prob`` or
    ``log_prob`` (where the settings file names a sampling filter; a fault elsewhere), or in ``rollout_log_probs``.
    ``response_mask`` stays whole, because verl's global counts are of the whole response.

    Args:
        old_log_prob, log_prob, advantages, response_mask: ``[B, R]``.
        loss_agg_mode: how tokens are weighted and what divides them.
        config: verl's ``ActorConfig``; ``global_batch_info`` holds the global counts.
        rollout_is_weights: verl's own behaviour-policy weights ``[B, R]``, in place of a correction of ours.
        rollout_log_probs: the engine's ``[B, R]``, read by a correction of ours.

    Returns:
        The loss times ``dp_size``, as verl's own losses are, and floats that verl logs: means over this microbatch.
    """
    settings = load_settings()
    chosen = loss_config(config, settings, loss_agg_mode=loss_agg_mode, length=log_prob.shape[-1], whole=False)
    loss, output, _ = _divided(
        chosen,
        config,
        curr_logprobs=log_prob,
        prev_logprobs=old_log_prob,
        generation_logprobs=rollout_log_probs,
        advantages=advantages,
        response_mask=response_mask,
        correction_weights=rollout_is_weights,
        filtered=filters(settings),
    )
    return loss, {f"actor/{name}": value for name, value in output.metrics.compute().items()}


def _divided(chosen: ActorLossConfig, config: Any, **tensors: Any) -> tuple[Tensor, LossOutput, Divisors]:
    """The loss divided by verl's global counts and multiplied by ``dp_size``."""
    if chosen.correction is not None and tensors["correction_weights"] is not None:
        raise ConfigurationError(
            "loss.correction and verl's rollout_is_weights both correct for the engine; switch one of them off"
        )
    raise_faults(chosen, **tensors)
    by = divisors(config.global_batch_info, chosen.denominator)
    output = actor_loss(chosen, **tensors, global_valid_tokens=by.tokens, global_valid_sequences=by.sequences)
    return output.loss * by.data_size, output, by


def hook_policy_loss(hooks: Hooks) -> None:
    """Add the policy loss to verl's registry."""
    module = "verl.trainer.ppo.core_algos"
    registry = symbol(module, "POLICY_LOSS_REGISTRY")
    hooks.insert(registry, LOSS_MODE, policy_loss, label=f"{module}.POLICY_LOSS_REGISTRY[{LOSS_MODE}]")


def hook_actor_loss(hooks: Hooks) -> None:
    """Let the workers compute all terms here where the policy loss is ours; every other loss stays verl's."""
    workers = host_module("verl.workers.engine_workers")

    @functools.wraps(symbol(workers.__name__, "ppo_loss"))
    def ppo_loss(config: Any, model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> Any:
        if config.policy_loss.get("loss_mode", "vanilla") != LOSS_MODE:
            return original(config, model_output, data, dp_group)
        return whole_loss(config, model_output, data)

    original: Callable[..., Any] = hooks.replace(workers, "ppo_loss", ppo_loss)


def whole_loss(config: Any, model_output: Mapping[str, Any], data: Any) -> tuple[Tensor, dict[str, Any]]:
    """Policy, KL and entropy terms of one microbatch: what verl's ``ppo_loss`` returns for its own losses.

    The KL term is on unfiltered log-probabilities and holds for tokens outside the support too.

    Args:
        config: verl's ``ActorConfig``.
        model_output: nested ``log_probs``, ``log_probs_unfiltered`` where rollouts are filtered, ``entropy``.
        data: verl's microbatch.

    Raises:
        ConfigurationError: rollouts are filtered and the engine did not filter its log-probabilities.
    """
    unpad = symbol("verl.workers.utils.padding", "no_padding_2_padding")
    settings = load_settings()
    filtered = filters(settings)
    if filtered and UNFILTERED not in model_output:
        raise ConfigurationError(
            f"sampling in the settings file needs an engine that filters its log-probabilities, got a model output "
            f"with {', '.join(sorted(model_output))}; use the Megatron engine without fused kernels, registered before "
            "the workers start"
        )
    current = unpad(model_output["log_probs"], data)
    info = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    config.global_batch_info.update(info, loss_scale_factor=config.loss_scale_factor)
    names = ("response_mask", "old_log_probs", "advantages", "rollout_is_weights", "rollout_log_probs", "ref_log_prob")
    padded = data.select(*(name for name in names if name in data)).to_padded_tensor()
    chosen = loss_config(config, settings, loss_agg_mode=config.loss_agg_mode, length=current.shape[-1], whole=True)
    entropy = model_output.get("entropy")
    loss, output, by = _divided(
        chosen,
        config,
        curr_logprobs=current,
        curr_logprobs_unfiltered=unpad(model_output[UNFILTERED], data) if filtered else current,
        entropy=None if entropy is None else unpad(entropy, data),
        prev_logprobs=padded["old_log_probs"],
        generation_logprobs=padded.get("rollout_log_probs", None),
        reference_logprobs=padded.get("ref_log_prob", None),
        advantages=padded["advantages"],
        response_mask=padded["response_mask"].to(torch.bool),
        correction_weights=padded.get("rollout_is_weights", None),
        filtered=filtered,
    )
    return loss, _logged(loss, output, by)


def _logged(loss: Tensor, output: LossOutput, by: Divisors) -> dict[str, Any]:
    """verl's metrics: added over microbatches and averaged over data-parallel ranks, as it does with a loss."""
    metric = symbol("verl.utils.metric", "Metric")
    tokens = output.valid_tokens if by.tokens is None else by.tokens
    sequences = output.valid_sequences if by.sequences is None else by.sequences
    found: dict[str, tuple[str, Any]] = {"actor/pg_loss": ("sum", loss.detach())}
    for name, value in output.metrics.items():
        if isinstance(value, Mean) and value.per in ("token", "sequence"):
            count = tokens if value.per == "token" else sequences
            found[f"actor/{name}"] = ("sum", value.total * by.data_size / count)
        elif isinstance(value, Sum):
            found[f"actor/{name}"] = ("sum", value.total * by.data_size)
        elif isinstance(value, Min | Max):
            found[f"actor/{name}"] = ("min" if isinstance(value, Min) else "max", value.value)
    numbers = torch.stack([torch.as_tensor(value, device=loss.device).double() for _, value in found.values()])
    return {
        name: metric(aggregation=kind, value=number)
        for (name, (kind, _)), number in zip(found.items(), numbers.tolist(), strict=True)
    }
