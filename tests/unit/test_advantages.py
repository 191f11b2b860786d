"""Advantage estimators: values worked out by hand, and what exclusion and empty shards do to them."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from megatron_support.advantages import (
    compute_advantages,
    gae_advantages,
    gdpo_advantages,
    grpo_advantages,
    kl_in_reward,
    reinforce_pp_advantages,
    rloo_advantages,
    whiten,
)
from megatron_support.config.advantages import (
    GAEConfig,
    GDPOConfig,
    GRPOConfig,
    KLInReward,
    OPDConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from megatron_support.config.recipe import ActorStepConfig
from megatron_support.errors import ConfigurationError, LogprobFault, RolloutError

INF, NAN = float("inf"), float("nan")
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 4.0, 2.0])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2])


def test_grpo_against_the_group_mean_and_std():
    """Group 7: mean .5, std sqrt(1/3) = .57735; group 2: mean 3, std sqrt(2)."""
    advantages = grpo_advantages(REWARDS, GROUPS)
    s, r = 0.5 / math.sqrt(1 / 3), 1 / math.sqrt(2)
    assert advantages.tolist() == pytest.approx([s, -s, -s, s, r, -r], rel=1e-6)
    plain = grpo_advantages(REWARDS, GROUPS, normalize_std=False)
    assert plain.tolist() == [0.5, -0.5, -0.5, 0.5, 1.0, -1.0]


def test_grpo_leave_one_out_uses_the_others_mean_and_std():
    """Sample 0 of group 7: the others are 0, 0, 1: mean 1/3, std sqrt(1/3). One other sample has no spread."""
    advantages = grpo_advantages(REWARDS, GROUPS, leave_one_out=True)
    s = (2 / 3) / math.sqrt(1 / 3)
    assert advantages.tolist() == pytest.approx([s, -s, -s, s, 2.0, -2.0], rel=1e-6)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    assert rloo_advantages(REWARDS, GROUPS).tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2], rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, -3.3])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_have_no_advantage(value, leave_one_out):
    rewards = torch.full((7,), value)
    advantages = grpo_advantages(rewards, torch.zeros(7, dtype=torch.int64), leave_one_out=leave_one_out)
    assert advantages.abs().max() <= 1e-9 * max(1.0, abs(value))


def test_a_lone_sample_has_no_advantage():
    assert grpo_advantages(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1])).tolist()[0] == 0


@pytest.mark.parametrize("junk", [NAN, INF, 1e9])
def test_a_masked_sample_enters_no_baseline(junk):
    rewards = torch.cat([REWARDS, torch.tensor([junk])])
    groups = torch.cat([GROUPS, torch.tensor([7])])
    mask = torch.tensor([True] * 6 + [False])
    for fn in (grpo_advantages, rloo_advantages):
        assert fn(rewards, groups, sample_mask=mask).tolist() == [*fn(REWARDS, GROUPS).tolist(), 0.0]


def test_the_order_of_samples_is_irrelevant():
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grpo_advantages(REWARDS[order], GROUPS[order]), grpo_advantages(REWARDS, GROUPS)[order])


class Ranks:
    """Data-parallel ranks as threads: a sum that waits for every rank, and fails if one does not come."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=30)
        self.slots: dict[int, torch.Tensor] = {}

    def global_sum(self, rank: int):
        def add(vector: torch.Tensor) -> torch.Tensor:
            self.slots[rank] = vector
            self.barrier.wait()
            total = sum(self.slots.values())
            self.barrier.wait()
            return total

        return add

    def run(self, fn) -> list:
        results: dict[int, object] = {}
        world = self.barrier.parties
        threads = [
            threading.Thread(target=lambda r=rank: results.__setitem__(r, fn(r, self.global_sum(r))))
            for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(world)]


def test_c15_whitening_over_two_ranks_and_an_empty_third():
    """[1, 2 | 3, 4 | nothing]: mean 2.5, unbiased variance 5/3: +-1.161895, +-.387298."""
    shards = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.zeros(0)]
    results = Ranks(3).run(
        lambda rank, total: whiten(shards[rank], torch.ones_like(shards[rank], dtype=torch.bool), global_sum=total)
    )
    expected = [-1.161895, -0.387298, 0.387298, 1.161895]
    assert torch.cat(results).tolist() == pytest.approx(expected, abs=1e-6)


def test_whitening_ignores_masked_entries_and_keeps_equal_ones_finite():
    values = torch.tensor([1.0, NAN, 2.0, INF, 3.0, 4.0])
    mask = torch.tensor([True, False, True, False, True, True])
    whitened = whiten(values, mask)
    assert whitened[~mask].tolist() == [0.0, 0.0]
    assert whitened[mask].tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)
    for count in (1, 3):
        assert whiten(torch.full((count,), 0.1), torch.ones(count, dtype=torch.bool)).abs().max() < 1e-15


# Two sequences: prompt, three response tokens with an environment token between; prompt, two response tokens.
MASK = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])
IDS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
OUTCOMES = torch.tensor([1.0, -2.0])


def test_gae_skips_what_is_not_a_response():
    """gamma .5, lambda .5. Sequence 0, values 1, 2, 3, reward 1 at the end:
    d = (0 + .5*2 - 1, 0 + .5*3 - 2, 1 - 3) = (0, -.5, -2); A = (-.25, -1, -2).
    Sequence 1, values 4, 6, reward -2: d = (.5*6 - 4, -2 - 6) = (-1, -8); A = (-3, -8)."""
    values = torch.tensor([NAN, 1.0, 99.0, 2.0, 3.0, NAN, 4.0, 6.0])
    output = gae_advantages(OUTCOMES, values, MASK, IDS, gamma=0.5, lam=0.5, whiten=False)
    assert output.advantages.tolist() == [0, -0.25, 0, -1, -2, 0, -3, -8]
    assert output.returns.tolist() == [0, 0.75, 0, 1, 1, 0, 1, -2]


def test_gae_with_gamma_and_lambda_one_is_the_return_minus_the_value():
    values = torch.arange(8.0)
    output = gae_advantages(OUTCOMES, values, MASK, IDS, gamma=1.0, lam=1.0, whiten=False)
    expected = torch.where(MASK > 0, OUTCOMES[IDS] - values, 0.0)
    torch.testing.assert_close(output.advantages, expected)


def test_a_length_adaptive_lambda_is_one_minus_one_over_alpha_length():
    """alpha 1: lambda 2/3 for three response tokens and 1/2 for two."""
    values = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0, 0.0, 4.0, 6.0])
    adaptive = gae_advantages(OUTCOMES, values, MASK, IDS, length_adaptive_alpha=1.0, whiten=False).advantages
    for sequence, lam in ((0, 2 / 3), (1, 1 / 2)):
        fixed = gae_advantages(OUTCOMES, values, MASK, IDS, lam=lam, whiten=False).advantages
        torch.testing.assert_close(adaptive[sequence == IDS], fixed[sequence == IDS])


def test_reinforce_pp_is_the_return_to_go():
    """Penalties .1 a token: sequence 0 returns 1 - .3, 1 - .2, 1 - .1; sequence 1: -2 - .2, -2 - .1."""
    penalty = torch.full((8,), 0.1)
    advantages = reinforce_pp_advantages(OUTCOMES, MASK, IDS, token_penalty=penalty, whiten=False)
    assert advantages.tolist() == pytest.approx([0, 0.7, 0, 0.8, 0.9, 0, -2.2, -2.1], abs=1e-6)
    discounted = reinforce_pp_advantages(OUTCOMES, MASK, IDS, gamma=0.5, whiten=False)
    assert discounted.tolist() == [0, 0.25, 0, 0.5, 1, 0, -1, -2]
    whitened = reinforce_pp_advantages(OUTCOMES, MASK, IDS)[MASK > 0]
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6) and whitened.std().item() == pytest.approx(1, abs=1e-6)
    baseline = reinforce_pp_advantages(OUTCOMES, MASK, IDS, group_ids=torch.zeros(2, dtype=torch.int64), whiten=False)
    assert baseline.tolist() == [0, 1.5, 0, 1.5, 1.5, 0, -1.5, -1.5]


def test_gdpo_keeps_a_small_component_from_drowning():
    """Components normalised apart: (1, 0) and (0, 100) in one group both give +-1 / sqrt(2): they cancel."""
    components = torch.tensor([[1.0, 0.0], [0.0, 100.0]])
    groups = torch.zeros(2, dtype=torch.int64)
    assert gdpo_advantages(components, groups, whiten=False).tolist() == [0.0, 0.0]
    weighted = gdpo_advantages(components, groups, weights=[2.0, 1.0], whiten=False)
    assert weighted.tolist() == pytest.approx([1 / math.sqrt(2), -1 / math.sqrt(2)], rel=1e-6)
    with pytest.raises(ConfigurationError, match="one entry per reward component, 2, got 3"):
        gdpo_advantages(components, groups, weights=[1.0, 1.0, 1.0])


def batch(**columns):
    return {
        "rewards": OUTCOMES,
        "group_ids": torch.tensor([0, 0]),
        "response_mask": MASK,
        "sequence_ids": IDS,
        **columns,
    }


PREV = torch.tensor([0.0, -1.0, 0.0, -INF, -1.0, 0.0, -1.0, -1.0])
REFERENCE = torch.tensor([0.0, -1.5, 0.0, -9.0, -1.0, 0.0, -1.0, -2.0])


def test_kl_in_reward_is_zero_outside_the_support():
    """k1 = prev - reference: .5, outside, 0 | 0, 1, times coef 2."""
    outside = PREV == -INF
    penalty = kl_in_reward(PREV, REFERENCE, MASK > 0, outside, coef=2.0, kind="k1")
    assert penalty.tolist() == [0, 1.0, 0, 0, 0, 0, 0, 2.0]


@pytest.mark.parametrize("config", [RLOOConfig(type="rloo"), GRPOConfig(normalize_std=False, leave_one_out=True)])
def test_a_group_relative_estimator_takes_the_kl_off_the_reward(config):
    """Rewards 1 - .5 and -2 - 1: advantages 3.5 and -3.5 at every response token, the excluded one too."""
    config = config.model_copy(update={"kl_in_reward": KLInReward(coef=1.0)})
    advantages = compute_advantages(config, **batch(prev_logprobs=PREV, reference_logprobs=REFERENCE))
    assert advantages.tolist() == [0, 3.5, 0, 3.5, 3.5, 0, -3.5, -3.5]


def test_unfiltered_previous_logprobs_are_taken_where_given():
    """prev_unfiltered -2 against reference -1.5 at token 1: KL -.5; the excluded token stays at 0."""
    config = ReinforcePPConfig(type="reinforce_pp", whiten=False, kl_in_reward=KLInReward(coef=1.0))
    unfiltered = torch.tensor([0.0, -2.0, 0.0, -5.0, -1.0, 0.0, -1.0, -2.0])
    columns = batch(prev_logprobs=PREV, reference_logprobs=REFERENCE, prev_logprobs_unfiltered=unfiltered)
    assert compute_advantages(config, **columns).tolist() == [0, 1.5, 0, 1, 1, 0, -2, -2]


def test_gae_passes_through_an_excluded_token():
    """With gamma and lambda 1 the advantage is the return minus the value: the penalty of token 3 alone is missing."""
    config = GAEConfig(type="gae", gamma=1.0, lam=1.0, whiten=False, kl_in_reward=KLInReward(coef=1.0))
    columns = batch(prev_logprobs=PREV, reference_logprobs=REFERENCE, values=torch.ones(8))
    assert compute_advantages(config, **columns).tolist() == [0, -0.5, 0, 0, 0, 0, -4, -4]


def test_opd_pulls_towards_the_teacher_inside_the_support():
    teacher = torch.tensor([0.0, -0.5, 0.0, -0.1, -3.0, 0.0, -1.0, -2.0])
    config = OPDConfig(type="opd", coef=2.0)
    advantages = compute_advantages(config, **batch(prev_logprobs=PREV, teacher_logprobs=teacher))
    assert advantages.tolist() == [0, 1, 0, 0, -4, 0, 0, -2]


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (GAEConfig(type="gae"), "values"),
        (OPDConfig(type="opd"), "prev_logprobs"),
        (OPDConfig(type="opd"), "teacher_logprobs"),
        (GDPOConfig(type="gdpo"), "reward_components"),
        (GRPOConfig(kl_in_reward=KLInReward(coef=0.1)), "reference_logprobs"),
    ],
)
def test_an_estimator_refuses_a_batch_without_its_column(config, missing):
    assert missing in config.columns
    columns = {"prev_logprobs": PREV, "reference_logprobs": REFERENCE, "values": PREV, "teacher_logprobs": REFERENCE}
    columns.pop(missing, None)
    with pytest.raises(RolloutError, match=f"{config.type} advantages need the column {missing}, got a batch without"):
        compute_advantages(config, **batch(**columns))


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("column", ["values", "teacher_logprobs", "prev_logprobs_unfiltered", "prev_logprobs"])
def test_a_nan_or_infinity_in_a_column_is_a_fault(column, value):
    config = GAEConfig(type="gae", kl_in_reward=KLInReward(coef=0.1))
    if column == "teacher_logprobs":
        config = OPDConfig(type="opd")
    columns = {
        "prev_logprobs": PREV.clone(),
        "prev_logprobs_unfiltered": torch.full((8,), -1.0),
        "reference_logprobs": REFERENCE,
        "values": torch.zeros(8),
        "teacher_logprobs": torch.full((8,), -1.0),
    }
    columns[column][5] = value  # a prompt token
    compute_advantages(config, **batch(**columns))
    columns[column][6] = value
    with pytest.raises(LogprobFault, match=f"{column} at token 6 of sequence 1 is (nan|inf), it must be finite"):
        compute_advantages(config, **batch(**columns))


def test_minus_infinity_without_a_filter_is_a_fault():
    config = GRPOConfig(kl_in_reward=KLInReward(coef=0.1))
    columns = batch(prev_logprobs=PREV, reference_logprobs=REFERENCE)
    compute_advantages(config, **columns, filtered=torch.tensor([True, False]))
    with pytest.raises(LogprobFault, match="prev_logprobs at token 3 of sequence 0 is -inf"):
        compute_advantages(config, **columns, filtered=torch.tensor([False, True]))


def test_masked_sequences_have_no_advantage():
    for config in (GRPOConfig(), ReinforcePPConfig(type="reinforce_pp"), GAEConfig(type="gae")):
        advantages = compute_advantages(config, **batch(values=torch.zeros(8)), sample_mask=torch.tensor([True, False]))
        assert (advantages[IDS == 1] == 0).all() and torch.isfinite(advantages).all()


@pytest.mark.parametrize("config", [ReinforcePPConfig(type="reinforce_pp"), GAEConfig(type="gae")])
def test_an_empty_shard_takes_part_in_whitening(config):
    whole = compute_advantages(config, **batch(values=torch.ones(8)))
    empty = {
        "rewards": OUTCOMES[:0],
        "group_ids": torch.zeros(0, dtype=torch.int64),
        "response_mask": MASK[:0],
        "sequence_ids": IDS[:0],
        "values": torch.zeros(0),
    }
    shards = [batch(values=torch.ones(8)), empty]
    full, none = Ranks(2).run(lambda rank, total: compute_advantages(config, **shards[rank], global_sum=total))
    torch.testing.assert_close(full, whole)
    assert none.numel() == 0


def test_the_recipe_takes_every_estimator_by_type():
    for data in (
        {"type": "grpo", "leave_one_out": True, "normalize_std": False},
        {"type": "rloo", "kl_in_reward": {"coef": 0.01}},
        {"type": "reinforce_pp", "baseline": True},
        {"type": "gae", "lam": 1.0},
        {"type": "opd"},
        {"type": "gdpo", "weights": [1.0, 0.5]},
    ):
        step = ActorStepConfig.from_dict({"advantages": data, "microbatch": {"max_tokens": 64}})
        assert step.advantages.type == data["type"]
    with pytest.raises(ConfigurationError, match=r"advantages.type: unknown type, got 'grp'; did you mean 'grpo'\?"):
        ActorStepConfig.from_dict({"advantages": {"type": "grp"}, "microbatch": {"max_tokens": 64}})
    with pytest.raises(ConfigurationError, match=r"advantages\.lam: must be less than or equal to 1, got 2\.0"):
        ActorStepConfig.from_dict({"advantages": {"type": "gae", "lam": 2.0}, "microbatch": {"max_tokens": 64}})
