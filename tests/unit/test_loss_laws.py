"""Laws of the loss on random inputs in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_support.loss import actor_loss
from megatron_support.metrics import MetricSet
from tests.loss_batch import (
    GRADIENTS,
    INF,
    SURROGATES,
    TERMS,
    VARIANTS,
    config,
    counts,
    flat,
    gradients,
    random_batch,
    with_gradients,
)

SOURCES = ("curr_logprobs", "prev_logprobs", "generation_logprobs")
TIGHT = {"rtol": 1e-12, "atol": 1e-12}
quick = settings(max_examples=2, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
every_variant = pytest.mark.parametrize("name", VARIANTS)


def choose(seed: int, batch: dict, share: float) -> torch.Tensor:
    """Some tokens of the mask, at least one and not all."""
    g = torch.Generator().manual_seed(seed + 1)
    chosen = (torch.rand(batch["response_mask"].shape, generator=g) < share) & batch["response_mask"]
    chosen[0, 1] = True
    chosen[3, 1] = False
    return chosen


# on_policy ignores previous log-probabilities.
EXCLUDING = [(name, source) for name in VARIANTS for source in SOURCES if (name, source) != ("on_policy", SOURCES[1])]


@pytest.mark.parametrize(("name", "source"), EXCLUDING)
@quick
@given(seed=seeds)
def test_excluding_is_clearing_the_token_in_the_actor_mask_alone(name, source, seed):
    """loss(excluded) = loss without KL(token cleared in the mask, same denominators) + KL term(full mask)."""
    batch = random_batch(seed)
    chosen = choose(seed, batch, 0.3)
    excluded = with_gradients({**batch, source: torch.where(chosen, -INF, batch[source])})
    actual = actor_loss(config(name), **excluded, **counts(batch))

    cleared = with_gradients({**batch, "response_mask": batch["response_mask"] & ~chosen})
    expected = actor_loss(config(name, kl=None), **cleared, **counts(batch)).loss
    wanted = gradients(expected, cleared)
    kl = VARIANTS[name].get("kl")
    if kl is not None:
        mask = batch["response_mask"]
        if kl.get("on_policy") and source == "generation_logprobs":
            mask = mask & ~chosen  # the weight of a token outside the generation support is 0
        if "sequence_error_threshold" in VARIANTS[name]:
            rejected = _rejected(cleared, VARIANTS[name]["sequence_error_threshold"])
            mask = mask & ~rejected[:, None]
        alone = with_gradients({**batch, "advantages": torch.zeros_like(batch["advantages"]), "response_mask": mask})
        term = actor_loss(
            config(name, surrogate={"type": "reinforce"}, sequence_error_threshold=None), **alone, **counts(batch)
        ).loss
        expected = expected + term
        wanted = {key: value + gradients(term, alone)[key] for key, value in wanted.items()}
    torch.testing.assert_close(actual.loss, expected, **TIGHT)
    for key, value in gradients(actual.loss, excluded).items():
        torch.testing.assert_close(value, wanted[key], **TIGHT)
    inside = chosen & batch["response_mask"] & batch["sample_mask"][:, None]
    assert actual.metrics["policy_support_excluded_tokens"].compute() == inside.sum()
    assert (gradients(actual.loss, excluded)["curr_logprobs"][chosen] == 0).all()


def _rejected(batch: dict, threshold: float) -> torch.Tensor:
    mask = batch["response_mask"]
    error = (batch["prev_logprobs"] - batch["generation_logprobs"]).abs().exp()
    return (error * mask).sum(-1) > threshold * mask.sum(-1)


@every_variant
@quick
@given(seed=seeds, junk=st.sampled_from([float("nan"), INF, -INF, 1e30]))
def test_masked_positions_may_hold_anything(name, seed, junk):
    batch = random_batch(seed)
    clean = with_gradients(batch)
    expected = actor_loss(config(name), **clean)
    masked = ~(batch["response_mask"] & batch["sample_mask"][:, None])
    dirty = with_gradients(
        {
            key: torch.where(masked, junk, value)
            if value.shape == masked.shape and value.is_floating_point()
            else value
            for key, value in batch.items()
        }
    )
    actual = actor_loss(config(name), **dirty)
    assert torch.equal(actual.loss, expected.loss)
    for key, value in gradients(actual.loss, dirty).items():
        assert torch.equal(value, gradients(expected.loss, clean)[key])
        assert (value[masked] == 0).all()
    assert actual.metrics.compute() == expected.metrics.compute()


@every_variant
@pytest.mark.parametrize("normalization", ["rollout", "survivors"])
@quick
@given(seed=seeds)
def test_splitting_into_microbatches_changes_nothing(name, normalization, seed):
    batch = random_batch(seed)
    chosen = choose(seed, batch, 0.2)
    batch["prev_logprobs"] = torch.where(chosen, -INF, batch["prev_logprobs"])
    whole_batch = with_gradients(batch)
    whole = actor_loss(config(name, normalization=normalization), **whole_batch)
    denominators = counts(batch)
    if normalization == "survivors":
        valid = batch["response_mask"] & batch["sample_mask"][:, None]
        survives = valid if VARIANTS[name].get("surrogate", {}).get("type") == "on_policy" else valid & ~chosen
        denominators = {
            "global_valid_tokens": whole.surviving_tokens,
            "global_valid_sequences": whole.surviving_sequences,
            "global_positive_tokens": (survives & (batch["rewards"] > 0)[:, None]).sum(),
        }
    total, metrics = 0.0, MetricSet()
    parts = with_gradients(batch)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4)):
        part = actor_loss(
            config(name, normalization=normalization),
            **{key: value[rows] for key, value in parts.items()},
            **denominators,
        )
        total = total + part.loss
        metrics = metrics.merge(part.metrics)
    torch.testing.assert_close(total, whole.loss, **TIGHT)
    for key, value in gradients(total, parts).items():
        torch.testing.assert_close(value, gradients(whole.loss, whole_batch)[key], **TIGHT)
    assert metrics.compute() == pytest.approx(whole.metrics.compute(), rel=1e-11, abs=1e-12)


@every_variant
@quick
@given(seed=seeds)
def test_rows_are_flat_tokens_in_any_order(name, seed):
    batch = random_batch(seed)
    batch["generation_logprobs"] = torch.where(choose(seed, batch, 0.2), -INF, batch["generation_logprobs"])
    order = torch.randperm(batch["response_mask"].numel(), generator=torch.Generator().manual_seed(seed))
    rows = with_gradients(batch)
    tokens = with_gradients(flat(batch, order))
    expected = actor_loss(config(name), **rows)
    actual = actor_loss(config(name), **tokens)
    torch.testing.assert_close(actual.loss, expected.loss, **TIGHT)
    for key, value in gradients(expected.loss, rows).items():
        torch.testing.assert_close(gradients(actual.loss, tokens)[key], value.reshape(-1)[order], **TIGHT)
    assert actual.metrics.compute() == pytest.approx(expected.metrics.compute(), rel=1e-11, abs=1e-12)
    for name in ("valid_tokens", "valid_sequences", "surviving_tokens", "surviving_sequences"):
        assert getattr(actual, name) == getattr(expected, name)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_the_dtype_of_a_mask_is_irrelevant(dtype):
    batch = random_batch(3)
    expected = actor_loss(config("kl_k3"), **batch)
    cast = {key: value.to(dtype) if value.dtype == torch.bool else value for key, value in batch.items()}
    actual = actor_loss(config("kl_k3"), **cast, filtered=torch.ones(4, dtype=dtype))
    assert torch.equal(actual.loss, expected.loss)
    assert actual.metrics.compute() == expected.metrics.compute()


WITHOUT_STOP_GRADIENT = ("ppo_clip", "dual_clip", "gspo", "sapo", "gmpo", "dro", "reinforce", "tis", "entropy")


@pytest.mark.parametrize("name", [*WITHOUT_STOP_GRADIENT, "kl_on_policy", "positive_nll"])
def test_gradcheck(name):
    """Against finite differences, with excluded and masked tokens in the batch."""
    batch = random_batch(11, length=4)
    batch["prev_logprobs"] = torch.where(choose(11, batch, 0.2), -INF, batch["prev_logprobs"])
    leaves = [batch[key].clone().requires_grad_() for key in GRADIENTS]

    def loss(*values):
        return actor_loss(config(name), **{**batch, **dict(zip(GRADIENTS, values, strict=True))}).loss

    assert torch.autograd.gradcheck(loss, leaves)


@every_variant
@quick
@given(seed=seeds)
def test_a_fully_excluded_response_contributes_exactly_nothing_to_the_actor_term(name, seed):
    batch = random_batch(seed)
    batch["curr_logprobs"][0] = -INF
    gone = {**batch, "response_mask": batch["response_mask"].clone()}
    gone["response_mask"][0] = False
    inputs, without = with_gradients(batch), with_gradients(gone)
    actual = actor_loss(config(name, kl=None), **inputs, **counts(batch))
    expected = actor_loss(config(name, kl=None), **without, **counts(batch))
    assert torch.equal(actual.loss, expected.loss)
    assert (gradients(actual.loss, inputs)["curr_logprobs"][0] == 0).all()
    assert actual.surviving_sequences == expected.surviving_sequences


@every_variant
@pytest.mark.parametrize("normalization", ["rollout", "survivors"])
def test_nothing_valid_gives_zero_with_a_graph(name, normalization):
    batch = random_batch(5)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    for key in ("curr_logprobs", "prev_logprobs", "curr_logprobs_unfiltered", "advantages", "entropy"):
        batch[key] = torch.full_like(batch[key], -INF)
    inputs = with_gradients(batch)
    output = actor_loss(config(name, normalization=normalization), **inputs)
    assert output.loss == 0 and output.loss.requires_grad
    assert all((value == 0).all() for value in gradients(output.loss, inputs).values())
    assert all(value == 0 for value in output.metrics.compute().values())


def test_no_tokens_at_all():
    batch = {key: value[:0] for key, value in random_batch(1).items()}
    inputs = with_gradients(batch)
    output = actor_loss(config("ppo_clip"), **inputs)
    output.loss.backward()
    assert output.loss == 0
    assert set(output.metrics) == set(actor_loss(config("ppo_clip"), **random_batch(1)).metrics)


@every_variant
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_nan_or_infinity_at_a_valid_token_never_comes_out_finite(name, value):
    sources = [*SOURCES, "advantages"]
    sources += ["reference_logprobs", "curr_logprobs_unfiltered"] if "kl" in VARIANTS[name] else []
    sources += ["entropy"] if "entropy_coef" in VARIANTS[name] else []
    for source in sources:
        if name == "on_policy" and source == "prev_logprobs":
            continue
        batch = random_batch(2)
        batch[source][3, 1] = value
        assert not torch.isfinite(actor_loss(config(name), **batch).loss), source


@pytest.mark.parametrize("other", SOURCES[:2])
def test_a_nan_beside_an_exclusion_is_still_a_fault(other):
    batch = random_batch(2)
    batch["generation_logprobs"][3, 1] = -INF
    batch[other][3, 1] = float("nan")
    output = actor_loss(config("ppo_clip"), **batch)
    assert torch.isnan(output.loss)
    assert output.metrics["policy_support_excluded_tokens"].compute() == 0


@every_variant
def test_minus_infinity_without_a_filter_never_comes_out_finite(name):
    for source in SOURCES:
        if name == "on_policy" and source == "prev_logprobs":
            continue
        batch = random_batch(2)
        batch[source][3, 1] = -INF
        per_sequence = torch.tensor([True, True, True, False])
        for filtered in (False, per_sequence, per_sequence[:, None].expand(4, 7)):
            assert not torch.isfinite(actor_loss(config(name), **batch, filtered=filtered).loss), source
        assert torch.isfinite(actor_loss(config(name), **batch, filtered=~per_sequence).loss)


@pytest.mark.parametrize("name", SURROGATES | TERMS)
def test_minimal_metrics_compute_the_same_loss(name):
    batch = random_batch(7)
    full = actor_loss(config(name), **batch)
    minimal = actor_loss(config(name), **batch, metrics="minimal")
    assert torch.equal(full.loss, minimal.loss)
    assert set(minimal.metrics) < set(full.metrics)
    assert {"policy_support_excluded_tokens", "num_valid_samples"} <= set(minimal.metrics)
    assert {key: full.metrics[key].compute() for key in minimal.metrics} == minimal.metrics.compute()


def test_metrics_and_counts_carry_no_gradient():
    output = actor_loss(config("kl_k3"), **with_gradients(random_batch(7)))
    tensors = [value for metric in output.metrics.values() for value in vars(metric).values()]
    tensors += [output.valid_tokens, output.valid_sequences, output.surviving_tokens, output.surviving_sequences]
    assert not any(value.requires_grad for value in tensors if isinstance(value, torch.Tensor))
    assert output.valid_tokens.dtype == output.surviving_sequences.dtype == torch.int64
