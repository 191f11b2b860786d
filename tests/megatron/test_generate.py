"""Sampling by the model: its distribution by hand, and the same tokens under every layout."""

import math

import pytest
import torch

from megatron_support.config.recipe import ParallelConfig
from megatron_support.megatron.generate import Sampler, draw, sampling_probabilities
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams
from tests.megatron.tiny import tiny_model
from tests.ranks import run_ranks

EOS = 7
PROMPTS = [[1, 2, 3], [4], [5, 6, 8, 9, 10, 11], [12, 13], [14, 15, 16]]


def probabilities(weights: list[float], **sampling) -> list[float]:
    return sampling_probabilities(torch.tensor([weights]).log(), SamplingParams(**sampling))[0].tolist()


def test_filters_by_hand():
    assert probabilities([4, 3, 2, 1]) == pytest.approx([0.4, 0.3, 0.2, 0.1])
    # top-k 3 leaves 4, 3, 2 of 9; above the third lies 7/9, so p = 0.7 leaves two and p = 0.8 all three
    assert probabilities([4, 3, 2, 1], top_k=3, top_p=0.7) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probabilities([4, 3, 2, 1], top_k=3, top_p=0.8) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    # temperature 1/2 squares the weights before anything else: 16, 9, 4, 1; above the second lies 16/30 < 0.6
    assert probabilities([4, 3, 2, 1], temperature=0.5, top_p=0.6) == pytest.approx([16 / 25, 9 / 25, 0, 0])


def test_equal_logits_stay_together():
    assert probabilities([2, 1, 2, 1, 1], top_k=3) == pytest.approx([2 / 7, 1 / 7, 2 / 7, 1 / 7, 1 / 7])
    # above each of the three last lies 4/7 = 0.571
    assert probabilities([2, 1, 2, 1, 1], top_p=0.58) == pytest.approx([2 / 7, 1 / 7, 2 / 7, 1 / 7, 1 / 7])
    assert probabilities([2, 1, 2, 1, 1], top_p=0.57) == pytest.approx([0.5, 0, 0.5, 0, 0])


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.8, 12, 0.9), SamplingParams(1.0, None, 0.5), SamplingParams(1.3, 5)]
)
def test_the_sampler_and_the_trainer_have_one_rule(sampling):
    """On the same logits, ties among them, every token has the log-probability that the trainer would give it."""
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    mine = sampling_probabilities(logits, sampling).log().float()
    for token in range(50):
        targets = torch.full((40,), token)
        trainers = support_logprobs(logits, targets, sampling, vocab_size=50).filtered
        torch.testing.assert_close(mine[:, token], trainers, rtol=1e-5, atol=1e-5)


def test_draws_invert_the_cumulative_distribution():
    row = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (math.nextafter(1.0, 0.0), 4)]:
        assert draw(row, torch.tensor([uniform], dtype=torch.float64)).item() == token


def generate(
    rank, world, parallel, *, prompts=PROMPTS, record_support=False, sampling=None, max_tokens=1000, dtype="float32"
):
    layout = ParallelConfig.from_dict(parallel)
    model, groups = tiny_model(layout)
    sampler = Sampler(model, layout, groups, dtype=dtype, max_tokens=max_tokens)
    return sampler.generate(
        prompts,
        sampling or SamplingParams(1.0, 20, 0.9),
        max_new_tokens=6,
        eos=EOS,
        seed=3,
        record_support=record_support,
    )


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, generate, {}, record_support=True)[0]


def assert_same(responses, expected):
    assert [r.tokens for r in responses] == [r.tokens for r in expected]
    for response, other in zip(responses, expected, strict=True):
        assert response.logprobs == pytest.approx(other.logprobs, abs=2e-6)
        assert response.kept == other.kept


@pytest.mark.parametrize(
    ("world", "parallel", "max_tokens"),
    [
        (2, {"tensor": 2}, 1000),
        (2, {"tensor": 2, "sequence": True}, 1000),
        (2, {"pipeline": 2}, 1000),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, 1000),
        (2, {"context": 2}, 1000),
        (2, {}, 1000),
        (1, {}, 12),
        (4, {"tensor": 2, "pipeline": 2}, 12),
    ],
    ids=str,
)
def test_every_layout_samples_the_same(alone, world, parallel, max_tokens):
    for responses in run_ranks(world, generate, parallel, record_support=True, max_tokens=max_tokens):
        assert_same(responses, alone)


def test_a_rank_without_a_prompt_learns_the_response():
    alone = run_ranks(1, generate, {}, prompts=PROMPTS[:1])[0]
    assert len(alone) == 1
    for responses in run_ranks(2, generate, {}, prompts=PROMPTS[:1]):
        assert_same(responses, alone)


def test_a_prompt_is_continued_as_if_it_were_alone(alone):
    """Padding and neighbours change nothing: greedy decoding of each prompt by itself."""
    greedy = SamplingParams(top_k=1)
    together = run_ranks(1, generate, {}, sampling=greedy)[0]
    for prompt, response in zip(PROMPTS, together, strict=True):
        single = run_ranks(1, generate, {}, prompts=[prompt], sampling=greedy)[0][0]
        assert response.tokens == single.tokens
        assert response.logprobs == pytest.approx([0.0] * len(response.tokens))


def test_a_response_ends_at_its_end_or_at_the_limit(alone):
    for response in alone:
        assert EOS not in response.tokens[:-1]
        assert len(response.tokens) == len(response.logprobs) == len(response.kept)
        assert response.tokens[-1] == EOS or len(response.tokens) == 6
        for token, kept in zip(response.tokens, response.kept, strict=True):
            assert token in kept and list(kept) == sorted(kept) and len(kept) <= 20


def test_end_of_sequence_stops_only_its_own_row():
    def run(rank, world):
        model, groups = tiny_model()
        sampler = Sampler(model, ParallelConfig(), groups, dtype="float32", max_tokens=1000)
        free = sampler.generate(PROMPTS, SamplingParams(), max_new_tokens=6, eos=-1, seed=3)
        end = free[2].tokens[1]
        return free, end, sampler.generate(PROMPTS, SamplingParams(), max_new_tokens=6, eos=end, seed=3)

    free, end, stopped = run_ranks(1, run)[0]
    for before, after in zip(free, stopped, strict=True):
        cut = before.tokens.index(end) + 1 if end in before.tokens else len(before.tokens)
        assert after.tokens == before.tokens[:cut]
    assert len(stopped[2].tokens) == 2


def test_weights_are_the_trainers_rounded_and_follow_it():
    def run(rank, world):
        model, groups = tiny_model()
        sampler = Sampler(model, ParallelConfig(), groups, dtype="bfloat16", max_tokens=1000)
        source, copy = model.bare_chunks[0], sampler.model.bare_chunks[0]
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(1.5)
        stale = next(copy.parameters()).clone()
        sampler.refresh()
        for parameter, rounded in zip(source.parameters(), copy.parameters(), strict=True):
            assert rounded.dtype == torch.bfloat16
            torch.testing.assert_close(rounded, parameter.bfloat16(), rtol=0, atol=0)
        assert not torch.equal(stale, next(copy.parameters()))
        return sampler.generate(PROMPTS, SamplingParams(top_p=0.9), max_new_tokens=4, eos=EOS, seed=1)

    assert len(run_ranks(1, run)[0]) == len(PROMPTS)
