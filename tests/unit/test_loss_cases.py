"""Values worked out by hand, most of them small inputs behind public bug reports."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from megatron_support.config import ActorLossConfig
from megatron_support.loss import actor_loss, diagnostics
from megatron_support.loss.masks import Selection
from megatron_support.metrics import MetricSet

INF = float("inf")
PPO = ActorLossConfig()
SURVIVORS = ActorLossConfig(normalization="survivors")
REINFORCE = {"surrogate": {"type": "reinforce"}}


def row(*values: float, grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def ones(like: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"advantages": torch.ones_like(like), "response_mask": torch.ones_like(like)}


def test_three_packed_tokens_the_middle_one_excluded():
    """Two packed sequences (a, b | c), the middle token b outside the support, REINFORCE, divided by survivors.

    loss = -(A_a log p_a + A_c log p_c) / 2 over the two survivors; A_a = -1, A_c = 1:
    d/d log p_a = 1/2, d/d log p_b = 0, d/d log p_c = -1/2: exactly [0.5, 0, -0.5].
    """
    curr = torch.tensor([-1.0, -INF, -2.0], requires_grad=True)
    output = actor_loss(
        ActorLossConfig.from_dict({**REINFORCE, "normalization": "survivors"}),
        curr_logprobs=curr,
        advantages=torch.tensor([-1.0, -1.0, 1.0]),
        response_mask=torch.tensor([True, True, True]),
        sequence_ids=torch.tensor([0, 0, 1]),
        sample_mask=torch.tensor([True, True]),
    )
    output.loss.backward()
    assert curr.grad.tolist() == [0.5, 0.0, -0.5]
    assert output.loss == (-1.0 + 2.0) / 2
    assert (output.valid_tokens, output.surviving_tokens, output.surviving_sequences) == (3, 2, 2)


@pytest.mark.parametrize(("config", "expected"), [(PPO, -0.711497), (SURVIVORS, -0.948663)])
@pytest.mark.parametrize("second", [-1.2, -INF])
def test_c1_a_previous_logprob_outside_the_support(config, expected, second):
    """-e^.1, nothing, -e^-.3, -1: sum -2.845989 over 4 response tokens or 3 survivors."""
    curr = row(-0.9, second, -2.3, -0.5, grad=True)
    prev = row(-1.0, -INF, -2.0, -0.5)
    output = actor_loss(config, curr_logprobs=curr, prev_logprobs=prev, **ones(prev))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected, abs=1e-6)
    assert curr.grad[0, 1] == 0
    count = 4 if config is PPO else 3
    assert (curr.grad * count)[0].tolist() == pytest.approx([-1.105171, 0, -0.740818, -1], abs=1e-6)


def test_c2_the_mismatch_over_survivors():
    """|d| = .1, excluded, 0: mean .05; e^|d| = 1.105171, 1: mean 1.052585."""
    prev, generation = row(-1.0, -INF, -2.0), row(-1.1, -0.7, -2.0)
    output = actor_loss(
        SURVIVORS, curr_logprobs=row(-1.0, -0.8, -2.0), prev_logprobs=prev, generation_logprobs=generation, **ones(prev)
    )
    values = output.metrics.compute()
    assert values["logprob_error"] == pytest.approx(0.05, abs=1e-12)
    assert values["token_mult_prob_error"] == pytest.approx(1.052585, abs=1e-6)
    clean = actor_loss(
        SURVIVORS, curr_logprobs=generation, prev_logprobs=generation, generation_logprobs=generation, **ones(prev)
    )
    assert list(clean.metrics) == list(output.metrics)  # names never depend on values


def test_c3_an_excluded_token_keeps_its_kl_term():
    """k3 of log-ratios -.2, .5, 0: .018731, .148721, 0: mean .055817. Dropping the middle one would give .009365."""
    prev = row(-1.0, -INF, -2.0)
    output = actor_loss(
        ActorLossConfig.from_dict({"kl": {"coef": 1.0}}),
        curr_logprobs=row(-1.0, -1.0, -2.0),
        prev_logprobs=prev,
        curr_logprobs_unfiltered=row(-1.0, -6.0, -2.0),
        reference_logprobs=row(-1.2, -5.5, -2.0),
        response_mask=torch.ones_like(prev),
        advantages=torch.zeros_like(prev),
    )
    assert output.loss.item() == pytest.approx(0.055817, abs=1e-6)
    assert output.metrics["kl_penalty"].compute() == pytest.approx(0.055817, abs=1e-6)


@pytest.mark.parametrize(("normalization", "expected"), [("rollout", 6 / 5), ("survivors", 6 / 4)])
@pytest.mark.parametrize("split", [[3, 2], [1, 2, 2], [5], [1, 1, 1, 1, 1]])
def test_c4_one_denominator_whatever_the_split(normalization, expected, split):
    """Token losses 1, excluded, 1 | 2, 2: as -A log p with log p = -1 and A the loss."""
    config = ActorLossConfig.from_dict({**REINFORCE, "normalization": normalization})
    curr = torch.tensor([-1.0, -INF, -1.0, -1.0, -1.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0])
    total = 0.0
    for c, a in zip(curr.split(split), advantages.split(split), strict=True):
        total += actor_loss(
            config,
            curr_logprobs=c,
            advantages=a,
            response_mask=torch.ones_like(c),
            sequence_ids=torch.zeros_like(c, dtype=torch.int64),
            global_valid_tokens=5 if normalization == "rollout" else 4,
        ).loss.item()
    assert total == pytest.approx(expected, rel=1e-6)


def test_c8_a_gated_weight_may_have_overflowed():
    """Weights e^1000 and 1, window [.5, 5]: the first is gated. -(0 + 1) / 2 = -.5, gradient [0, -.5]."""
    curr = row(-1.0, -1.0, grad=True)
    prev = row(-1.0, -1.0)
    config = ActorLossConfig.from_dict({"correction": {"type": "icepop", "low": 0.5, "high": 5.0}})
    output = actor_loss(
        config, curr_logprobs=curr, prev_logprobs=prev, generation_logprobs=row(-1001.0, -1.0), **ones(prev)
    )
    output.loss.backward()
    assert output.loss.item() == -0.5
    assert curr.grad.tolist() == [[0.0, -0.5]]


def test_c8_a_masked_nan_leaves_sum_and_mean_alone():
    """-A log p of log p -1, NaN (masked), -3 with A = 1: sum 4, mean 2."""
    curr = row(-1.0, math.nan, -3.0)
    for aggregation, expected in (("token_sum", 4.0), ("token_mean", 2.0)):
        config = ActorLossConfig.from_dict({**REINFORCE, "aggregation": {"type": aggregation}})
        mask = torch.tensor([[1, 0, 1]])
        output = actor_loss(config, curr_logprobs=curr, advantages=torch.ones_like(curr), response_mask=mask)
        assert output.loss.item() == expected


def test_c8_a_masked_outlier_leaves_the_mean_alone():
    """[[1, 100], [1, -50]] with only the first column valid: 1, not 26."""
    curr = torch.tensor([[-1.0, -100.0], [-1.0, 50.0]])
    mask = torch.tensor([[1, 0], [1, 0]])
    config = ActorLossConfig.from_dict({**REINFORCE, "aggregation": {"type": "sequence_mean"}})
    assert actor_loss(config, curr_logprobs=curr, advantages=torch.ones(2, 2), response_mask=mask).loss == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_c9_a_huge_ratio_is_bounded(dtype):
    """curr 0, prev -100. A = 1: clipped at 1.2, gradient 0. A = 0: 0. A = -1: at most e^20, gradient 0."""
    for advantage, expected in ((1.0, -1.2), (0.0, 0.0), (-1.0, math.exp(20))):
        curr = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
        output = actor_loss(
            PPO,
            curr_logprobs=curr,
            prev_logprobs=torch.full((1, 1), -100.0),
            advantages=torch.full((1, 1), advantage),
            response_mask=torch.ones(1, 1),
        )
        output.loss.backward()
        assert output.loss.item() == pytest.approx(expected, rel=1e-6)
        assert curr.grad.item() == 0


def _losses(values: list[float], ids: list[int], masked: set[int] = frozenset(), **settings):
    """Token losses as -A log p with log p = -1."""
    config = ActorLossConfig.from_dict({**REINFORCE, **settings.pop("config", {})})
    curr = torch.full((len(values),), -1.0, requires_grad=True)
    return actor_loss(
        config,
        curr_logprobs=curr,
        advantages=torch.tensor(values),
        response_mask=torch.tensor([i not in masked for i in range(len(values))]),
        sequence_ids=torch.tensor(ids),
        sample_mask=torch.ones(3, dtype=torch.bool),
        **settings,
    )


@pytest.mark.parametrize(
    "split",
    [
        [([1.0, 3.0, 3.0, 3.0], [0, 1, 1, 1]), ([2.0, 2.0], [2, 2])],
        [([1.0], [0]), ([3.0, 3.0, 3.0], [1, 1, 1]), ([2.0, 2.0], [2, 2])],
        [([1.0, 3.0, 3.0, 3.0, 2.0, 2.0], [0, 1, 1, 1, 2, 2])],
    ],
)
def test_c11_c16_sum_of_losses_over_the_global_count(split):
    """{1}, {3,3,3}, {2,2}: 14 / 6, 3 samples and 6 tokens for every split."""
    total, tokens, metrics = 0.0, 0, MetricSet()
    for values, ids in split:
        output = _losses(values, ids, global_valid_tokens=6)
        total += output.loss.item()
        tokens += int(output.valid_tokens)
        metrics = metrics.merge(output.metrics)
    assert total == pytest.approx(14 / 6, rel=1e-6)
    assert tokens == 6
    assert metrics["num_valid_samples"].compute() == 3


def test_c12_a_masked_row_is_not_in_the_denominator():
    curr = torch.full((2, 4), -1.0)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    for kind in ("token_mean", "sequence_mean"):
        config = ActorLossConfig.from_dict({**REINFORCE, "aggregation": {"type": kind}})
        assert actor_loss(config, curr_logprobs=curr, advantages=torch.ones(2, 4), response_mask=mask).loss == 1.0


def test_c13_an_empty_microbatch_changes_no_other():
    empty = _losses([5.0, 5.0], [0, 0], masked={0, 1}, global_valid_tokens=2)
    other = _losses([2.0, 4.0], [1, 2], global_valid_tokens=2)
    assert empty.loss == 0 and empty.loss.requires_grad
    assert (empty.loss + other.loss).item() == 3.0


def test_c14_a_sequence_mean_weighs_sequences_alike():
    """s = [1.1, .9], A = [1, -1], lengths 4 and 1: -(1.1 - .9) / 2 = -.1. A token mean would give -.7."""
    curr = torch.log(torch.tensor([[1.1] * 4, [0.9] * 4], dtype=torch.float64)) - 1
    config = ActorLossConfig.from_dict({"ratio_level": "sequence", "aggregation": {"type": "sequence_mean"}})
    output = actor_loss(
        config,
        curr_logprobs=curr,
        prev_logprobs=torch.full_like(curr, -1.0),
        advantages=torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 4),
        response_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]),
    )
    assert output.loss.item() == pytest.approx(-0.1, abs=1e-12)


def test_c19_a_sum_over_the_response_alone():
    """Entry t is about token t: mask [0,0,1,1] of log p [0, -.1, -.2, -.4] sums to -.6, not -.4."""
    curr = row(0.0, -0.1, -0.2, -0.4)
    config = ActorLossConfig.from_dict({**REINFORCE, "aggregation": {"type": "token_sum"}})
    output = actor_loss(
        config,
        curr_logprobs=curr,
        advantages=torch.ones_like(curr),
        response_mask=torch.tensor([[0, 0, 1, 1]]),
    )
    assert -output.loss.item() == pytest.approx(-0.6, abs=1e-12)


class TwoRanks:
    """Two context-parallel ranks as threads of one autograd graph: their sum is the sum over the group."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=30)
        self.slots: list[torch.Tensor | None] = [None, None]

    def sequence_sum(self, rank: int):
        def add(values: torch.Tensor) -> torch.Tensor:
            self.slots[rank] = values
            self.barrier.wait()
            total = self.slots[0] + self.slots[1]
            self.barrier.wait()
            return total

        return add

    def run(self, fn) -> list:
        results: list = [None, None]

        def work(rank: int) -> None:
            results[rank] = fn(rank, self.sequence_sum(rank))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize("counts_sequences", [None, True])
def test_c26_a_sequence_ratio_over_two_context_parallel_ranks(counts_sequences):
    """log-ratio [.4, .2 | -.1, .1], mask [1, 1 | 1, 0], A = 2: s = exp(.5 / 3) = 1.181360, loss -2.362721,
    gradient -2 s / 3 = -.787574 on each of the three tokens."""
    curr = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([-0.6, -0.8], [-1.1, -0.9])]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 0])]
    config = ActorLossConfig.from_dict({"ratio_level": "sequence", "aggregation": {"type": "sequence_mean"}})

    def loss(rank, sequence_sum):
        return actor_loss(
            config,
            curr_logprobs=curr[rank],
            prev_logprobs=torch.full((2,), -1.0, dtype=torch.float64),
            advantages=torch.full((2,), 2.0, dtype=torch.float64),
            response_mask=masks[rank],
            sequence_ids=torch.zeros(2, dtype=torch.int64),
            sample_mask=torch.ones(1, dtype=torch.bool),
            sequence_sum=sequence_sum,
            counts_sequences=None if counts_sequences is None else rank == 0,
            global_valid_sequences=1,
        )

    outputs = TwoRanks().run(loss)
    total = outputs[0].loss + outputs[1].loss
    total.backward()
    assert total.item() == pytest.approx(-2.362721, abs=1e-6)
    gradient = torch.cat([curr[0].grad, curr[1].grad]).tolist()
    assert gradient == pytest.approx([-0.787574, -0.787574, -0.787574, 0.0], abs=1e-6)
    assert sum(int(output.valid_sequences) for output in outputs) == 1
    assert sum(int(output.valid_tokens) for output in outputs) == 3


@pytest.mark.parametrize("halves", [[-1.0, -2.0], [-2.0, -1.0]])
def test_a_sequence_in_equal_halves_is_counted_once(halves):
    def loss(rank, sequence_sum):
        return actor_loss(
            PPO,
            curr_logprobs=torch.full((1, 2), halves[rank]),
            prev_logprobs=torch.full((1, 2), halves[rank]),
            advantages=torch.ones(1, 2),
            response_mask=torch.ones(1, 2),
            sequence_sum=sequence_sum,
        )

    outputs = TwoRanks().run(loss)
    assert sum(int(output.valid_sequences) for output in outputs) == 1
    assert sum(int(output.surviving_sequences) for output in outputs) == 1


def test_min_support_fraction_drops_the_actor_term_and_keeps_the_kl():
    """Row 0 keeps 1 of 4 tokens, row 1 all 4. Token losses 1; KL (k2) of log-ratio 1 is 1/2 on all 8 tokens."""
    curr = torch.full((2, 4), -1.0, dtype=torch.float64)
    curr[0, :3] = -INF
    inputs = {
        "curr_logprobs": curr,
        "curr_logprobs_unfiltered": torch.full_like(curr, -1.0),
        "reference_logprobs": torch.full_like(curr, -2.0),
        "advantages": torch.ones_like(curr),
        "response_mask": torch.ones_like(curr),
    }
    settings = {**REINFORCE, "kl": {"coef": 1.0, "type": "k2"}, "min_support_fraction": 0.5}
    rollout = actor_loss(ActorLossConfig.from_dict(settings), **inputs)
    assert rollout.loss.item() == (4 + 8 * 0.5) / 8
    assert rollout.metrics["dropped_sequences"].compute() == 1
    assert rollout.metrics["policy_support_excluded_tokens"].compute() == 3
    survivors = actor_loss(ActorLossConfig.from_dict({**settings, "normalization": "survivors"}), **inputs)
    assert survivors.loss.item() == (4 + 8 * 0.5) / 4
    assert (survivors.surviving_tokens, survivors.surviving_sequences, survivors.valid_tokens) == (4, 1, 8)


def test_opsm_drops_a_far_sequence_with_a_negative_advantage():
    """prev - curr is .5 in rows 0 and 1; only row 0 has A < 0. Row 2 is near."""
    prev = torch.full((3, 2), -1.0, dtype=torch.float64)
    curr = prev - torch.tensor([[0.5], [0.5], [0.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]], dtype=torch.float64).expand(3, 2)
    config = ActorLossConfig.from_dict({**REINFORCE, "sequence_mask": {"type": "opsm", "threshold": 0.4}})
    output = actor_loss(
        config, curr_logprobs=curr, prev_logprobs=prev, advantages=advantages, response_mask=torch.ones_like(prev)
    )
    assert output.loss.item() == pytest.approx((2 * 1.5 - 2 * 1.0) / 6, abs=1e-12)
    assert output.metrics["dropped_sequences"].compute() == 1


def test_error_threshold_masks_a_sequence_from_actor_and_kl():
    """Row 0 has a mean e^|d| of e^.5 = 1.65 > 1.5 and leaves both terms; row 1 has -inf in generation and stays."""
    prev = torch.full((2, 2), -1.0, dtype=torch.float64)
    generation = torch.tensor([[-1.5, -1.5], [-1.0, -INF]], dtype=torch.float64)
    settings = {**REINFORCE, "kl": {"coef": 1.0, "type": "k2"}, "sequence_error_threshold": 1.5}
    inputs = {
        "curr_logprobs": prev,
        "prev_logprobs": prev,
        "generation_logprobs": generation,
        "curr_logprobs_unfiltered": prev,
        "reference_logprobs": prev - 1,
        "advantages": torch.ones_like(prev),
        "response_mask": torch.ones_like(prev),
    }
    output = actor_loss(ActorLossConfig.from_dict(settings), **inputs)
    assert output.loss.item() == (1 + 2 * 0.5) / 4  # rollout counts stay
    assert output.metrics["rejected_sequences"].compute() == 1
    survivors = actor_loss(ActorLossConfig.from_dict({**settings, "normalization": "survivors"}), **inputs)
    assert survivors.loss.item() == (1 + 2 * 0.5) / 1
    # On policy the check compares the current policy, which is 1 above the generation one here.
    far = {**inputs, "generation_logprobs": generation - 1}
    on_policy = {**settings, "surrogate": {"type": "on_policy"}}
    assert actor_loss(ActorLossConfig.from_dict(on_policy), **far).metrics["rejected_sequences"].compute() == 2


def test_topr_truncates_only_negative_advantages():
    """Ratios 2 and 2: A = 1 has weight 1, A = -1 has weight min(2, 1) = 1; ratio .5: A = -1 has weight .5."""
    curr = torch.log(torch.tensor([[0.4, 0.4, 0.1]], dtype=torch.float64))
    prev = torch.log(torch.tensor([[0.2, 0.2, 0.2]], dtype=torch.float64))
    advantages = row(1.0, -1.0, -1.0)
    config = ActorLossConfig.from_dict({"surrogate": {"type": "topr"}, "aggregation": {"type": "token_sum"}})
    output = actor_loss(
        config, curr_logprobs=curr, prev_logprobs=prev, advantages=advantages, response_mask=torch.ones_like(prev)
    )
    expected = -(1.0 * math.log(0.4) - 1.0 * math.log(0.4) - 0.5 * math.log(0.1))
    assert output.loss.item() == pytest.approx(expected, abs=1e-12)


def test_host_weights_take_the_place_of_the_correction():
    curr = row(-1.0, -1.0, -1.0)
    inputs = {"curr_logprobs": curr, "prev_logprobs": curr, "response_mask": torch.tensor([[1, 1, 0]])}
    weights = row(0.5, 2.0, math.nan)
    output = actor_loss(PPO, **inputs, advantages=torch.ones_like(curr), correction_weights=weights)
    assert output.loss.item() == -(0.5 + 2.0) / 2


def test_exclusion_is_visible_in_the_metrics():
    """Four tokens with A = 2, -1, -1, 4; the current policy excludes the first, generation the first and second."""
    prev = row(-1.0, -1.0, -1.0, -1.0)
    output = actor_loss(
        PPO,
        curr_logprobs=row(-INF, -1.0, -1.0, -1.0),
        prev_logprobs=prev,
        generation_logprobs=row(-INF, -INF, -1.0, -1.0),
        advantages=row(2.0, -1.0, -1.0, 4.0),
        response_mask=torch.ones_like(prev),
    )
    values = output.metrics.compute()
    names = ("policy_support_excluded_tokens", "excluded_by_current", "excluded_by_previous", "excluded_by_generation")
    assert [values[name] for name in names] == [2, 1, 0, 2]
    assert values["excluded_share_positive"] == values["excluded_share_negative"] == 0.5
    assert values["excluded_advantage_mass"] == 3 / 8


def test_effective_sample_size_of_unequal_weights():
    """Weights 1 and 3: (1 + 3)^2 / (2 (1 + 9)) = .8, also when each comes from its own microbatch."""
    generation = torch.log(torch.tensor([[0.3, 0.1]], dtype=torch.float64))
    prev = torch.log(torch.tensor([[0.3, 0.3]], dtype=torch.float64))
    metrics = MetricSet()
    for part in (slice(0, 1), slice(1, 2)):
        p, g = prev[:, part], generation[:, part]
        metrics = metrics.merge(
            actor_loss(PPO, curr_logprobs=p, prev_logprobs=p, generation_logprobs=g, **ones(p)).metrics
        )
    assert metrics["effective_sample_size"].compute() == pytest.approx(0.8, abs=1e-12)


@pytest.mark.parametrize("shift", [-15.0, -8.0, 0.0, 8.0, 15.0])
def test_effective_sample_size_of_weights_of_any_size(shift):
    """Every other token is masked; the weights of the others are e^shift times 1 and 3, in fp32."""
    prev = torch.full((4, 256), -16.0)
    generation = prev - shift
    generation[:, 2::4] -= math.log(3)
    batch = ones(prev) | {"response_mask": torch.arange(256).expand(4, -1) % 2 == 0}
    output = actor_loss(PPO, curr_logprobs=prev, prev_logprobs=prev, generation_logprobs=generation, **batch)
    metrics = output.metrics.compute()
    assert metrics["effective_sample_size"] == pytest.approx(0.8, rel=1e-5)
    assert metrics["sampling_importance_ratio"] == pytest.approx(2 * math.exp(shift), rel=1e-5)


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("signs", ["both", "above", "below"])
@pytest.mark.parametrize("spread", [1e-3, 0.3, 12.0])
@pytest.mark.parametrize(
    "surrogate",
    [
        {"type": "ppo_clip", "clip_low": 0.02, "clip_high": 0.2},
        {"type": "ppo_clip", "clip_low": 0.02, "clip_high": 0.2, "dual_clip": 1.5},
        {"type": "cispo", "clip_low": 0.02, "clip_high": 0.2},
    ],
    ids=lambda fields: "dual" if "dual_clip" in fields else fields["type"],
)
@pytest.mark.parametrize("block", [None, 64])
def test_diagnostics_are_what_their_formulas_say(surrogate, spread, signs, ratio_level, block, monkeypatch):
    """Of 23 x 31 tokens, by arithmetic over the tokens that take part, one by one in float64.

    ``signs``: whether log-ratios lie on both sides of a masked token's 0, or all above or below it. ``spread``: up to
    where exponents are clamped. ``block``: tokens worked through at once; 713 are not a multiple of 64.
    """
    if block is not None:
        monkeypatch.setattr(diagnostics, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    shape = (23, 31)

    def noise() -> torch.Tensor:
        values = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        return values if signs == "both" else values.abs() if signs == "above" else -values.abs()

    curr = -8 * torch.rand(shape, generator=generator, dtype=torch.float64)
    prev = curr - noise()
    generation = prev - noise()
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[-1, -3:] = True
    aggregation = {"type": "token_mean" if ratio_level == "token" else "sequence_mean"}
    config = ActorLossConfig.from_dict({"surrogate": surrogate, "ratio_level": ratio_level, "aggregation": aggregation})
    values = actor_loss(
        config,
        curr_logprobs=curr,
        prev_logprobs=prev,
        generation_logprobs=generation,
        advantages=advantages,
        response_mask=mask,
    ).metrics.compute()
    log_ratio = curr - prev
    if ratio_level == "sequence":
        means = torch.where(mask, log_ratio, 0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
        log_ratio = means.expand(shape)
    ratio, d = log_ratio.clamp(-20, 20).exp()[mask], (prev - generation).clamp(-20, 20)[mask]
    a, clipped = advantages[mask], ratio.clamp(0.98, 1.2)
    touched = ratio != clipped if surrogate["type"] == "cispo" else ratio * a > clipped * a
    expected = {
        "probs_ratio": ratio.mean(),
        "probs_ratio_min": ratio.min(),
        "probs_ratio_max": ratio.max(),
        "probs_ratio_clamped": clipped.mean(),
        "clip_fraction_low": (touched & (ratio < 1)).double().mean(),
        "clip_fraction_high": (touched & (ratio > 1)).double().mean(),
        "js_divergence_error": ((1 + d.exp()).log() - math.log(2) - d / 2).mean(),
        "token_mult_prob_error": d.abs().exp().mean(),
        "gen_kl_error": (d.exp() - 1 - d).mean(),
        "approx_entropy": -((curr - generation).clamp(-20, 20).exp() * curr)[mask].mean(),
    }
    assert {name: values[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-9
    )
    assert spread < 1 or values["clip_fraction_low"] + values["clip_fraction_high"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", [-25.0, -12.0, -0.3125, 0.3125, 12.0, 25.0])
def test_mismatch_of_many_equal_tokens(d, dtype):
    """999 tokens with prev - generation = d, clamped into [-20, 20]: log((1 + e^d) / 2) - d / 2 = log cosh(d / 2)."""
    prev = torch.full((1, 999), -32.0, dtype=dtype)
    batch = {"curr_logprobs": prev, "prev_logprobs": prev, "generation_logprobs": prev - d}
    values = actor_loss(PPO, **batch, **ones(prev)).metrics.compute()
    clamped = max(-20.0, min(20.0, d))
    rel = 1e-9 if dtype == torch.float64 else 1e-5
    assert values["js_divergence_error"] == pytest.approx(math.log(math.cosh(clamped / 2)), rel=rel)
    assert values["approx_entropy"] == pytest.approx(32 * math.exp(clamped), rel=rel)
    assert values["logprob_error"] == pytest.approx(abs(clamped), rel=rel)


@pytest.mark.parametrize("surrogate", ["ppo_clip", "cispo"])
def test_shares_of_what_was_excluded_count_tokens_of_dropped_sequences_too(surrogate):
    """Advantages 2, 2, 2, -1 | 4, -3, -3, 5. Excluded: the first of the first sequence, three of the second, of which
    the fourth then leaves as well: 1 of 4 survives, less than half.

    Positive: 5 tokens, 3 excluded; negative: 3, 1 excluded; mass 22, 14 excluded. The minus sign of the dropped token
    counts among the negative ones."""
    advantages = torch.tensor([[2.0, 2, 2, -1], [4, -3, -3, 5]])
    outside = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1]]).bool()
    prev = torch.full((2, 4), -1.0).masked_fill(outside, -INF)
    output = actor_loss(
        ActorLossConfig.from_dict({"min_support_fraction": 0.5, "surrogate": {"type": surrogate}}),
        curr_logprobs=torch.full((2, 4), -1.0),
        prev_logprobs=prev,
        advantages=advantages,
        response_mask=torch.ones(2, 4),
    )
    values = output.metrics.compute()
    assert values["dropped_sequences"] == 1
    assert values["excluded_share_positive"] == pytest.approx(3 / 5)
    assert values["excluded_share_negative"] == pytest.approx(1 / 3)
    assert values["excluded_advantage_mass"] == pytest.approx(14 / 22)


@pytest.mark.parametrize("source", ["entropy", "correction_weights"])
def test_a_fault_in_a_dropped_sequence_is_still_a_fault(source):
    prev = torch.full((2, 4), -1.0)
    prev[1, 1:] = -INF
    batch = {"curr_logprobs": torch.full((2, 4), -1.0), "prev_logprobs": prev, **ones(prev)}
    extra = {"entropy": torch.ones(2, 4), "correction_weights": torch.ones(2, 4)}
    config = ActorLossConfig(min_support_fraction=0.5, entropy_coef=0.1)
    output = actor_loss(config, **batch, **extra)
    assert output.metrics["dropped_sequences"].compute() == 1 and torch.isfinite(output.loss)
    extra[source][1, 0] = math.nan
    assert torch.isnan(actor_loss(config, **batch, **extra).loss)


def test_second_derivatives_of_masked_tokens_are_zero():
    """s = sum w x over the chosen: ds/dx is w there and 0 elsewhere, and so is its derivative with respect to w."""
    values = torch.tensor([1.0, -INF, math.nan, 2.0], requires_grad=True)
    weights = torch.tensor([3.0, 4.0, 5.0, 6.0], requires_grad=True)
    chosen = Selection(torch.tensor([True, False, False, True]))
    for selected in (chosen(values), chosen.difference(values, torch.ones(4))):
        (first,) = torch.autograd.grad((selected * weights).sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weights)
        assert first.tolist() == [3.0, 0.0, 0.0, 6.0]
        assert second.tolist() == [1.0, 0.0, 0.0, 1.0]
