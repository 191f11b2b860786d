"""The path for trainers without Megatron: token-aligned results from whole logits."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_support import SamplingParams
from megatron_support.support import previous_logprobs, token_logprobs
from tests.support_reference import reference

IDS = torch.tensor([[1, 5, 2, 7, 3], [0, 0, 4, 6, 2]])
ATTENTION = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]])
RESPONSE = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]])
RESPONSES = [(0, 2), (0, 3), (1, 3), (1, 4)]


def test_entry_t_is_about_token_t_predicted_from_t_minus_1():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 8) * 2
    found = previous_logprobs(logits, IDS, ATTENTION, RESPONSE, SamplingParams(0.7, 3, 0.9))
    for sample in range(2):
        for token in range(5):
            if (sample, token) not in RESPONSES:
                assert found[sample, token] == 0.0
                continue
            row = logits[sample, token - 1 : token]
            want = reference(row, IDS[sample, token : token + 1], temperature=0.7, top_k=3, top_p=0.9)
            inside = bool(want.kept[0, IDS[sample, token]])
            expected = want.filtered if inside else torch.tensor([-math.inf])
            torch.testing.assert_close(found[sample, token], expected[0].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf])
def test_logits_of_prompt_and_padding_may_hold_anything(garbage):
    torch.manual_seed(1)
    logits = torch.randn(2, 5, 8)
    predicts = torch.zeros(2, 5, dtype=torch.bool)
    for sample, token in RESPONSES:
        predicts[sample, token - 1] = True
    dirty = torch.where(predicts[..., None], logits, garbage).requires_grad_()
    sampling = SamplingParams(1.0, None, 0.5)
    clean = previous_logprobs(logits, IDS, ATTENTION, RESPONSE, sampling)
    found = token_logprobs(dirty, IDS, ATTENTION, RESPONSE, sampling, entropy=True)
    assert torch.equal(found.filtered.detach(), clean)
    (found.unfiltered.sum() + found.entropy.sum()).backward()
    assert torch.isfinite(dirty.grad).all() and not dirty.grad[~predicts].any() and dirty.grad[predicts].any()


def test_minus_infinity_appears_at_response_tokens_only():
    logits = torch.zeros(2, 5, 8)
    logits[..., 0] = 5.0  # top-1 keeps token 0 alone, which no response has
    found = token_logprobs(logits, IDS, ATTENTION, RESPONSE, SamplingParams(1.0, 1))
    assert torch.equal(found.filtered == -math.inf, RESPONSE.bool())
    assert torch.equal(~found.in_support, RESPONSE.bool())


def test_mask_dtypes_agree():
    """Case C22: bool, uint8, int64, fp32 and bf16 masks."""
    logits = torch.randn(2, 5, 8)
    results = [
        previous_logprobs(logits, IDS, ATTENTION.to(dtype), RESPONSE.to(dtype), SamplingParams())
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_per_token_settings_are_about_the_token():
    torch.manual_seed(2)
    logits = torch.randn(2, 5, 8)
    temperature = torch.rand(2, 5) + 0.5
    found = previous_logprobs(logits, IDS, ATTENTION, RESPONSE, SamplingParams(temperature))
    for sample, token in RESPONSES:
        want = torch.log_softmax(logits[sample, token - 1] / temperature[sample, token], -1)[IDS[sample, token]]
        torch.testing.assert_close(found[sample, token], want, rtol=0, atol=1e-6)


def test_a_response_token_that_nothing_predicts_is_an_error():
    response = RESPONSE.clone()
    response[1, 2] = 1
    with pytest.raises(ValueError, match="response token 2 of sample 1 has no token before it"):
        previous_logprobs(torch.zeros(2, 5, 8), IDS, ATTENTION, response, SamplingParams())
    with pytest.raises(ValueError, match="response_mask must have the shape of input_ids"):
        previous_logprobs(torch.zeros(2, 5, 8), IDS, ATTENTION, response[:, 1:], SamplingParams())
    with pytest.raises(ValueError, match=r"logits must be \[B, S, V\]"):
        previous_logprobs(torch.zeros(2, 4, 8), IDS, ATTENTION, RESPONSE, SamplingParams())


def test_a_transformers_model_with_left_padding():
    """A real model: padding a batch on the left changes no response log-probability, and both match its log-softmax."""
    transformers = pytest.importorskip("transformers", reason="the Hugging Face extra is not installed")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = transformers.LlamaForCausalLM(config).eval()
    single = torch.randint(1, 97, (1, 6))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), single], 1)
    attention = (padded != 0).long()
    position_ids = (attention.cumsum(1) - 1).clamp(min=0)
    response = torch.tensor([[0, 0, 0, 1, 1, 1]])
    padded_response = torch.cat([torch.zeros(1, 3, dtype=torch.int64), response], 1)
    sampling = SamplingParams(0.8, 40, 0.95)
    with torch.no_grad():
        plain = model(input_ids=single).logits
        left = model(input_ids=padded, attention_mask=attention, position_ids=position_ids).logits
    want = previous_logprobs(plain, single, torch.ones_like(single), response, sampling)
    found = previous_logprobs(left, padded, attention, padded_response, sampling)
    torch.testing.assert_close(found[:, 3:], want, rtol=0, atol=1e-5)
    assert found[:, :6].tolist() == [[0.0] * 6]
    naive = reference(plain[0, 2:5], single[0, 3:], temperature=0.8, top_k=40, top_p=0.95)
    inside = naive.kept.gather(1, single[0, 3:, None]).squeeze(1)
    assert torch.equal(want[0, 3:] > -math.inf, inside)
    torch.testing.assert_close(want[0, 3:][inside], naive.filtered[inside].detach().float(), rtol=0, atol=2e-6)
