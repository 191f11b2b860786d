"""verl's Megatron engine: log-probabilities under the rollout's filter, -inf kept; and the KL term in rewards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_support.adapters.context import AdapterSettings, global_vocab_size, load_settings, running_groups
from megatron_support.adapters.hooks import Hooks, host_module, symbol
from megatron_support.adapters.verl.loss import UNFILTERED
from megatron_support.adapters.verl.options import filters
from megatron_support.errors import ConfigurationError
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams

ENGINE = "verl.workers.engine.megatron.transformer_impl"
_REFERENCE = "_policy_support_reference"


def hook_logprobs(hooks: Hooks) -> None:
    """Filter what the engine's language-model head returns, in the actor's passes and in training.

    Reference passes (a ``forward_only`` engine, or the actor without its adapter) stay verl's, as does everything where
    the settings file names no filter.
    """
    engine = symbol(ENGINE, "MegatronEngineWithLMHead")
    base = symbol(ENGINE, "MegatronEngine")

    def processor(self: Any, logits: Tensor, label: Tensor, temperature: Tensor, **options: Any) -> dict[str, Tensor]:
        settings = load_settings()
        reference = self.engine_config.forward_only or getattr(self, _REFERENCE, False)
        if reference or options["distillation_only"] or not filters(settings):
            return original(self, logits, label, temperature, **options)
        return head_logprobs(self, logits, label, temperature, settings, **options)

    @contextmanager
    def without_adapter(self: Any) -> Iterator[Any]:
        with disable(self) as found:
            setattr(self, _REFERENCE, True)
            try:
                yield found
            finally:
                setattr(self, _REFERENCE, False)

    original = hooks.replace(engine, "_lm_head_logits_processor", processor)
    disable = hooks.replace(base, "disable_adapter", without_adapter)


def head_logprobs(
    engine: Any,
    logits: Tensor,
    label: Tensor,
    temperature: Tensor,
    settings: AdapterSettings,
    *,
    calculate_entropy: bool,
    **options: Any,
) -> dict[str, Tensor]:
    """Per-token outputs of one microbatch, in verl's names.

    Args:
        engine: verl's.
        logits: ``[B, S, V/TP]``.
        label: ``[B, S]``, the token that each row predicts.
        temperature: ``[B, S]``, verl's; 0 at padding.
        settings: the filter's top-k and top-p.
        calculate_entropy: whether to return it.
        options: what else verl can ask for.

    Returns:
        ``log_probs``, -inf outside the support; ``log_probs_unfiltered`` where a gradient is taken; ``entropy`` of the
        whole vocabulary.
    """
    for name in ("calculate_sum_pi_squared", "distillation_use_topk"):
        if options.get(name):
            raise ConfigurationError(f"{name} must be off where sampling is set in the settings file, got True")
    assert settings.sampling is not None
    if settings.sampling.temperature != 1.0:
        raise ConfigurationError(
            f"sampling.temperature must be left out in verl, which says it, got {settings.sampling.temperature}; "
            "set actor_rollout_ref.rollout.temperature"
        )
    groups = running_groups()
    sampling = SamplingParams(
        torch.where(temperature > 0, temperature, 1.0).float(), settings.sampling.top_k, settings.sampling.top_p
    )
    stated = getattr(engine.model_config.hf_config, "vocab_size", None)
    values = support_logprobs(
        logits,
        label,
        sampling,
        vocab_size=global_vocab_size(logits.shape[-1], groups, settings.vocab_size, stated),
        tp_group=groups.tensor,
        entropy=calculate_entropy,
        ties=settings.logprobs.ties,
        chunk_size=settings.logprobs.chunk_size,
    )
    found = {"log_probs": values.filtered}
    if torch.is_grad_enabled():
        found[UNFILTERED] = values.unfiltered
    if values.entropy is not None:
        found["entropy"] = values.entropy
    return found


def hook_reward_kl(hooks: Hooks) -> None:
    """Make verl's KL estimators 0 at a token outside the support: its driver applies them to rewards."""
    module = host_module("verl.trainer.ppo.core_algos")

    @functools.wraps(symbol(module.__name__, "kl_penalty"))
    def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
        if not filters(load_settings()):
            return original(logprob, ref_logprob, kl_penalty)
        outside = torch.isneginf(logprob)
        values = original(torch.where(outside, ref_logprob, logprob), ref_logprob, kl_penalty)
        return torch.where(outside, 0.0, values)

    original = hooks.replace(module, "kl_penalty", kl_penalty)
