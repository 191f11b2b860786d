"""Losses, gradients and metrics measured from two frameworks (see tests/golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_support.adapters.nemo_rl.options import described_loss
from megatron_support.config import ActorLossConfig
from megatron_support.loss import actor_loss
from tests.adapters.nemo_rl_standin import CONFIG as NEMO_RL_DEFAULTS

FOLDER = Path(__file__).parents[1] / "golden"
NEMO_RL = json.loads((FOLDER / "nemo_rl.json").read_text())
VERL = json.loads((FOLDER / "verl.json").read_text())
RTOL = 2e-6


def close(actual, expected, what):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=RTOL,
        atol=1e-12,
        msg=lambda text: f"{what}: {text}",
    )


def nemo_rl_config(theirs: dict) -> ActorLossConfig:
    """By the adapter's own mapping."""
    return ActorLossConfig.from_dict(described_loss(SimpleNamespace(**(NEMO_RL_DEFAULTS | theirs))))


@pytest.mark.parametrize("case", NEMO_RL, ids=lambda case: case["name"])
def test_nemo_rl(case):
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    curr = x["curr_logprobs"].requires_grad_()
    unfiltered = x["curr_logprobs_unfiltered"].requires_grad_()
    config = nemo_rl_config(case["config"])
    positive = None
    if config.positive_nll_coef:
        outside = (x["prev_logprobs"] == -torch.inf) | (x["generation_logprobs"] == -torch.inf) | (curr == -torch.inf)
        survives = (x["response_mask"] * x["sample_mask"][:, None] > 0) & ~outside
        positive = (survives & (x["rewards"] > 0)[:, None]).sum()
    output = actor_loss(
        config,
        **x,
        global_valid_tokens=case["global_valid_tokens"],
        global_valid_sequences=case["global_valid_sequences"],
        global_positive_tokens=positive,
    )
    expected = case["expected"]
    close(output.loss, expected["loss"], "loss")
    grads = torch.autograd.grad(output.loss, (curr, unfiltered), allow_unused=True)
    close(grads[0], expected["grad_curr_logprobs"], "gradient")
    theirs = torch.tensor(expected["grad_curr_logprobs_unfiltered"], dtype=torch.float64)
    close(torch.zeros_like(curr) if grads[1] is None else grads[1], theirs, "unfiltered gradient")
    values = output.metrics.compute()
    assert values["policy_support_excluded_tokens"] == expected["policy_support_excluded_tokens"]
    if config.kl is not None:
        close(values["kl_penalty"] * config.kl.coef, expected["kl_loss"], "kl_penalty")
    for name, value in expected["metrics"].items():
        if name == "positive_nll_loss":
            if config.positive_nll_coef:  # theirs divides by survivors
                total = output.metrics[name].total
                close(total / max(int(positive), 1), value, name)
            continue
        if name == "sampling_importance_ratio" and config.ratio_level == "sequence":
            # Theirs multiplies weights [B, 1] by a mask [B], which is an outer product: the sum over all B rows, where
            # a masked row has weight exp(0). Ours is the mean over valid sequences.
            masked_rows = len(x["rewards"]) - float(output.valid_sequences)
            close(output.metrics[name].total + masked_rows, value, name)
            continue
        close(values[name], value, name)


AGGREGATION = {
    "token-mean": "token_mean",
    "token-sum": "token_sum",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "dr_grpo",
}


def verl_config(case: dict) -> ActorLossConfig:
    theirs, loss = case["config"], case["loss"]
    low, high = theirs.get("clip_ratio_low"), theirs.get("clip_ratio_high")
    clip = {"clip_low": low, "clip_high": high}
    surrogate = {
        "vanilla": lambda: {"type": "ppo_clip", **clip, "dual_clip": theirs["clip_ratio_c"]},
        "gspo": lambda: {"type": "ppo_clip", **clip},
        "sapo": lambda: {"type": "sapo", "tau_positive": theirs["tau_pos"], "tau_negative": theirs["tau_neg"]},
        "geo_mean": lambda: {"type": "gmpo", **clip},
        "cispo": lambda: {"type": "cispo", **clip},
        "dppo_tv": lambda: {"type": "dppo_tv", "low": low, "high": high, "ratio_cap": theirs["clip_ratio_c"]},
        "dppo_kl": lambda: {"type": "dppo_kl", "low": low, "high": high, "ratio_cap": theirs["clip_ratio_c"]},
        "dro": lambda: {"type": "dro", "beta": theirs["dro_beta"]},
        "gpg": lambda: {"type": "reinforce"},
    }[loss]()
    aggregation = {"type": AGGREGATION[case["aggregation"]]}
    if aggregation["type"] == "dr_grpo":
        aggregation["max_length"] = theirs["loss_scale_factor"]
    return ActorLossConfig.from_dict(
        {
            "surrogate": surrogate,
            "aggregation": aggregation,
            "ratio_level": "sequence_token" if loss == "gspo" else "token",
        }
    )


@pytest.mark.parametrize("case", VERL, ids=lambda case: case["name"])
def test_verl(case):
    x = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    curr = x["curr_logprobs"].requires_grad_()
    output = actor_loss(
        verl_config(case),
        **x,
        global_valid_tokens=case["global_valid_tokens"],
        global_valid_sequences=case["global_valid_sequences"],
    )
    expected = case["expected"]
    close(output.loss, expected["loss"], "loss")
    close(torch.autograd.grad(output.loss, curr)[0], expected["grad_curr_logprobs"], "gradient")
    values = output.metrics.compute()
    assert values["policy_support_excluded_tokens"] == expected["policy_support_excluded_tokens"]
    # Theirs are means over the tokens of the cleared mask; ours divide by the response tokens.
    scale = float(output.valid_tokens) / float(output.surviving_tokens)
    ours = {name: value * scale for name, value in verl_metrics(case["loss"], values).items()}
    measured = dict(expected["metrics"])
    if case["loss"] == "geo_mean":  # theirs splits by the sign of the advantage, ours by the side of the window
        measured["actor/pg_clipfrac"] += measured.pop("actor/pg_clipfrac_lower")
    for name, value in measured.items():
        close(ours[name], value, name)


def verl_metrics(loss: str, values: dict[str, float]) -> dict[str, float]:
    """Their three metrics from ours."""
    low, high = values.get("clip_fraction_low", 0.0), values.get("clip_fraction_high", 0.0)
    metrics = {"actor/ppo_kl": values["approx_kl"], "actor/pg_clipfrac": low + high}
    metrics["actor/pg_clipfrac_lower"] = values.get("bound_fraction", 0.0)
    return metrics
