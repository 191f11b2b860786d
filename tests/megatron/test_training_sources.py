"""Rollout sources: batches put together by hand, files that start again, draws that differ from step to step."""

import pytest
import torch

from megatron_support.config.recipe import SamplerRollouts
from megatron_support.megatron.generate import Response
from megatron_support.training.sources import FileSource, SamplerSource, make_rollouts
from megatron_support.training.tasks import EOS, get_task

CONFIG = SamplerRollouts.from_dict(
    {
        "type": "sampler",
        "task": "swap",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 2,
        "sampling": {"temperature": 0.5, "top_p": 0.75},
    }
)
A, B, C, END = ord("a"), ord("b"), ord("c"), ord(">")


def response(*tokens: int, kept=None) -> Response:
    return Response(tokens=tokens, logprobs=tuple(-0.5 * (i + 1) for i in range(len(tokens))), kept=kept)


def batch(kept=None):
    """Swap "ab" and "cc": right, ended at once, half right, right."""
    task = get_task("swap")
    prompts = [task.encode("ab>")] * 2 + [task.encode("cc>")] * 2
    tokens = [(B, A), (EOS,), (C, B), (C, C)]
    responses = [response(*row, kept=None if kept is None else kept[i]) for i, row in enumerate(tokens)]
    return make_rollouts(task, prompts, responses, CONFIG, step=3)


def test_a_batch_by_hand():
    rollouts = batch()
    assert rollouts.lengths.tolist() == [6, 5, 6, 6]
    assert rollouts.tokens[6:11].tolist() == [257, A, B, END, EOS]
    masks = rollouts.response_mask.int().split(rollouts.lengths.tolist())
    assert [mask.tolist() for mask in masks] == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1],
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]
    assert rollouts.generation_logprobs[:6].tolist() == [0, 0, 0, 0, -0.5, -1]
    # the third: one of two letters, and 0.2 for another letter of the alphabet
    assert rollouts.rewards.tolist() == pytest.approx([1, 0, 0.6, 1])
    assert rollouts.group_ids.tolist() == [0, 0, 1, 1]
    assert rollouts.sample_ids == ("3-0-0", "3-0-1", "3-1-0", "3-1-1")
    assert (rollouts.prompts[2], rollouts.responses[:2]) == ("cc>", ("ba", ""))
    assert (rollouts.temperature[0], rollouts.top_k[0], rollouts.top_p[0]) == (0.5, 0, 0.75)
    assert rollouts.support is None


def test_kept_sets_belong_to_response_tokens():
    rollouts = batch(kept=[((A, B), (A,)), ((EOS,),), ((C,), (A, B, C)), ((C,), (C,))])
    sizes = rollouts.support.offsets.diff()[rollouts.response_mask]
    assert sizes.tolist() == [2, 1, 1, 1, 3, 1, 1]
    assert rollouts.support.offsets[-1] == sizes.sum(), "prompt tokens have none"
    assert rollouts.support.token_ids.tolist() == [A, B, A, EOS, C, A, B, C, C, C]


def test_a_file_starts_again_in_the_middle_of_a_step():
    source = FileSource(batch(), 3)
    names = [source.rollouts(step).sample_ids for step in range(4)]
    assert names == [
        ("3-0-0", "3-0-1", "3-1-0"),
        ("3-1-1", "3-0-0", "3-0-1"),
        ("3-1-0", "3-1-1", "3-0-0"),
        ("3-0-1", "3-1-0", "3-1-1"),
    ]


class _Recorder:
    """Stands for the model: gives the right answers and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seeds: list[int] = []
        self.prompts: list[list[list[int]]] = []

    def refresh(self) -> None:
        self.calls.append("refresh")

    def generate(self, prompts, sampling, *, max_new_tokens, eos, seed, record_support):
        self.calls.append("generate")
        self.seeds.append(seed)
        self.prompts.append(prompts)
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, None, 0.75)
        assert (max_new_tokens, eos) == (2, EOS)
        return [response(prompt[2], prompt[1]) for prompt in prompts]


def test_each_step_has_fresh_weights_prompts_and_draws():
    sampler = _Recorder()
    source = SamplerSource(get_task("swap"), sampler, CONFIG, seed=5)
    batches = [source.rollouts(step) for step in range(3)]
    assert sampler.calls == ["refresh", "generate"] * 3
    assert len(set(sampler.seeds)) == 3 and sampler.prompts[0] != sampler.prompts[1]
    for rollouts, prompts in zip(batches, sampler.prompts, strict=True):
        assert prompts[0] == prompts[1] and prompts[2] == prompts[3], "samples of one prompt stand together"
        assert torch.equal(rollouts.rewards, torch.ones(4))
    again = SamplerSource(get_task("swap"), sampler, CONFIG, seed=5).rollouts(1)
    assert torch.equal(again.tokens, batches[1].tokens) and sampler.seeds[3] == sampler.seeds[1]
