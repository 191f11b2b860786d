"""NeMo-RL's loss contract through Megatron's schedule: gradients of its layouts are ours on one process."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch

from megatron_support.adapters.nemo_rl import SupportLossFn
from megatron_support.adapters.nemo_rl.options import described_loss, loss_config
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError, LogprobFault
from megatron_support.loss import actor_loss
from megatron_support.support import support_logprobs
from megatron_support.types import SamplingParams
from tests.adapters import nemo_rl_standin as standin
from tests.megatron.tiny import parameter_gradients, shard_of, tiny_model, token_batch
from tests.ranks import run_ranks

VOCAB, WIDTH, SEQUENCES, MICRO = 100, 16, 8, 2
SAMPLING = {"top_k": 60, "top_p": 0.9, "temperature": 0.8}
LENGTHS = (16, 12, 16, 9, 14, 16, 11, 16)
TIS = {
    "ratio_clip_max": 0.28,
    "reference_policy_kl_penalty": 0.05,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 2.0,
}
GSPO = {
    "token_level_loss": False,
    "sequence_level_importance_ratios": True,
    "ratio_clip_max": 0.28,
    "reference_policy_kl_penalty": 0.05,
}


@pytest.fixture(autouse=True)
def settings_file(tmp_path, monkeypatch):
    """NeMo-RL does not tell its loss function the size of the vocabulary without padding."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"vocab_size: {VOCAB}")
    monkeypatch.setenv("MEGATRON_SUPPORT_CONFIG", str(path))


def theirs(options: dict) -> types.SimpleNamespace:
    return types.SimpleNamespace(**(standin.CONFIG | options))


def batch() -> dict[str, torch.Tensor]:
    """NeMo-RL's columns ``[B, S]``: some previous log-probabilities outside the support, a masked sample."""
    generator = torch.Generator().manual_seed(3)

    def logprobs():
        return -4 - 0.6 * torch.rand(SEQUENCES, WIDTH, generator=generator)

    position, lengths = torch.arange(WIDTH).expand(SEQUENCES, WIDTH), torch.tensor(LENGTHS)[:, None]
    previous, mask = logprobs(), ((position >= 4) & (position < lengths)).float()
    outside = torch.rand(previous.shape, generator=generator) < 0.1
    sample_mask = torch.ones(SEQUENCES)
    sample_mask[2] = 0
    return {
        "input_ids": torch.randint(0, VOCAB, (SEQUENCES, WIDTH), generator=generator),
        "token_mask": mask,
        "sample_mask": sample_mask,
        "advantages": torch.randn(SEQUENCES, 1, generator=generator).expand(SEQUENCES, WIDTH).contiguous(),
        "prev_logprobs": torch.where(outside & (mask != 0), -torch.inf, previous * mask),
        "generation_logprobs": logprobs() * mask,
        "reference_policy_logprobs": logprobs(),
    }


def counts(columns) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequences, tokens) as NeMo-RL counts them over the whole batch."""
    tokens = (columns["token_mask"][:, 1:] * columns["sample_mask"][:, None]).sum()
    return columns["sample_mask"].sum(), tokens


def _reference(rank, world, options, columns):
    """One process, all rows, plain autograd."""
    model, groups = tiny_model(calculate_per_token_loss=True)
    rows = token_batch(list(columns["input_ids"]), packed=False, groups=groups)
    logits = model.chunks[0](rows.input_ids, rows.position_ids, None)[:, :-1].contiguous()
    sampling = SamplingParams(SAMPLING["temperature"], SAMPLING["top_k"], SAMPLING["top_p"])
    values = support_logprobs(logits, columns["input_ids"][:, 1:], sampling, vocab_size=VOCAB)
    output = actor_loss(
        ActorLossConfig.from_dict(described_loss(theirs(options))),
        curr_logprobs=values.filtered,
        curr_logprobs_unfiltered=values.unfiltered,
        advantages=columns["advantages"][:, 1:],
        response_mask=columns["token_mask"][:, 1:],
        sample_mask=columns["sample_mask"] != 0,
        prev_logprobs=columns["prev_logprobs"][:, 1:],
        generation_logprobs=columns["generation_logprobs"][:, 1:],
        reference_logprobs=columns["reference_policy_logprobs"][:, 1:],
    )
    output.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.chunks[0].named_parameters()}
    return gradients, output.metrics.compute() | {"loss": float(output.loss)}


def _nemo_rl(rank, world, parallel, options, columns, packed):
    """Megatron's schedule and DDP under NeMo-RL's factors; gradients, and metrics summed as its loop does."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_support import register
    from megatron_support.megatron.model import wrap_ddp
    from megatron_support.megatron.parts import call_chunk

    nemo_rl = standin.installed(sys.modules)
    register("nemo_rl")
    model, groups = tiny_model(ParallelConfig.from_dict(parallel), calculate_per_token_loss=True)
    model = wrap_ddp(model)
    pieces = [{name: values[i : i + MICRO] for name, values in columns.items()} for i in range(0, SEQUENCES, MICRO)]
    share = len(pieces) // groups.data_size
    pieces = pieces[groups.data_rank * share :][:share]
    seqs, toks = counts(columns)
    processor = nemo_rl.train.LossPostProcessor(
        nemo_rl.grpo.ClippedPGLossFn(theirs(options)),
        {},
        num_microbatches=share,
        sampling_params=standin.TrainingSamplingParams(**SAMPLING),
    )

    def forward_step(iterator, chunk):
        piece = next(iterator)
        params = None
        sequences = list(piece["input_ids"])
        if packed:  # each sequence padded to a multiple of 4
            real = [int(mask.nonzero().max()) + 1 for mask in piece["token_mask"]]
            sequences = [row[: -(-length // 4) * 4] for row, length in zip(sequences, real, strict=True)]
            bounds = [torch.tensor([0, *sizes]).cumsum(0) for sizes in (real, [len(row) for row in sequences])]
            params = PackedSeqParams(cu_seqlens_q=bounds[0], cu_seqlens_q_padded=bounds[1])
        output = call_chunk(chunk, token_batch(sequences, packed=packed, groups=groups))
        process = processor(piece, params, global_valid_seqs=seqs, global_valid_toks=toks)
        return output, lambda logits: process(logits / SAMPLING["temperature"])

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(pieces),
        model=model.chunks[0],
        num_microbatches=share,
        seq_length=WIDTH,
        micro_batch_size=MICRO,
        forward_only=False,
    )
    metrics = found[0]
    for other in found[1:]:
        metrics = {name: standin.combined(name, value, other[name]) for name, value in metrics.items()}
    return parameter_gradients(model), metrics, groups.tensor_size, groups.tensor_rank, groups.data_rank


@pytest.mark.parametrize("options", [TIS, GSPO], ids=["tis", "gspo"])
@pytest.mark.parametrize(
    ("world", "parallel", "packed"),
    [(1, {}, False), (1, {}, True), (2, {"tensor": 2}, False), (2, {}, False), (2, {"context": 2}, True)],
    ids=["rows", "packed", "tp2", "dp2", "packed_cp2"],
)
def test_gradients_and_metrics_are_those_of_one_process(world, parallel, packed, options):
    expected, expected_metrics = run_ranks(1, _reference, options, batch())[0]
    results = run_ranks(world, _nemo_rl, parallel, options, batch(), packed)
    for gradients, _, size, rank, _ in results:
        for name, gradient in gradients.items():
            want = shard_of(name, expected[name], size, rank)
            torch.testing.assert_close(gradient, want, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
    by_data_rank = {result[4]: result[1] for result in results}.values()  # NeMo-RL adds these over data-parallel ranks
    names = set(next(iter(by_data_rank)))
    assert {"loss", "kl_penalty", "probs_ratio", "probs_ratio_min", "policy_support_excluded_tokens"} <= names
    for name in names:
        total, *others = (metrics[name] for metrics in by_data_rank)
        for other in others:
            total = standin.combined(name, total, other)
        # NeMo-RL counts a sequence by its sample mask, ours by a response token in it; here they are the same
        assert total == pytest.approx(expected_metrics[name], rel=1e-4, abs=1e-6), name


@pytest.fixture
def nemo_rl(monkeypatch):
    modules = dict(sys.modules)
    found = standin.installed(modules)
    for name in modules.keys() - sys.modules.keys():
        monkeypatch.setitem(sys.modules, name, modules[name])
    return found


def _loss_of(logits, columns, options=TIS, **changes):
    loss = SupportLossFn(theirs(options))
    loss.sampling = SamplingParams(1.0, SAMPLING["top_k"], SAMPLING["top_p"])
    seqs, toks = counts(columns)
    return loss(columns | changes, changes.get("seqs", seqs), changes.get("toks", toks), logits)


@pytest.fixture
def logits():
    return torch.randn(SEQUENCES, WIDTH, VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_an_excluded_token_leaves_the_gradients_of_the_others_as_if_deleted(nemo_rl, logits):
    columns = batch()
    options = TIS | {"reference_policy_kl_penalty": 0.0}
    loss, metrics = _loss_of(logits, columns, options)
    outside = torch.isneginf(columns["prev_logprobs"]) & (columns["sample_mask"][:, None] != 0)
    deleted = columns | {"token_mask": torch.where(outside, 0.0, columns["token_mask"])}
    seqs, toks = counts(columns)
    other, _ = _loss_of(logits, deleted, options, seqs=seqs, toks=toks)
    assert outside.sum() > 0
    assert metrics["policy_support_excluded_tokens"] >= outside.sum()
    gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, other)]
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    assert not gradients[0][:, :-1][outside[:, 1:]].any()


def test_counts_of_one_leave_sums_that_the_normalizers_say_how_to_divide(nemo_rl, logits):
    """What NeMo-RL's trainer with split steps does: it passes 1 and divides each metric once, later."""
    columns = batch()
    seqs, toks = counts(columns)
    for options, gradient_by in ((TIS, toks), (GSPO, seqs)):
        loss = SupportLossFn(theirs(options))
        once, whole = _loss_of(logits, columns, options)
        one = torch.ones(())
        later, sums = _loss_of(logits, columns, options, seqs=one, toks=one)
        torch.testing.assert_close(later / gradient_by, once)
        by = {
            standin.MetricNormalizer.TOKENS: float(toks),
            standin.MetricNormalizer.SEQUENCES: float(seqs),
            standin.MetricNormalizer.NONE: 1.0,
        }
        assert set(loss.metric_normalizations) == set(whole)
        for name, value in sums.items():
            assert value / by[loss.metric_normalizations[name]] == pytest.approx(whole[name], rel=1e-5), name
        assert loss.loss_type is (standin.LossType.TOKEN_LEVEL if options is TIS else standin.LossType.SEQUENCE_LEVEL)


def test_a_fault_names_its_token(nemo_rl, logits):
    columns = batch()
    columns["generation_logprobs"][0, 6] = torch.nan
    with pytest.raises(LogprobFault, match=r"generation_logprobs at token .* of sequence 0 is nan"):
        _loss_of(logits, columns)


def test_a_worker_that_is_not_registered_is_named(nemo_rl, logits):
    loss = SupportLossFn(theirs(TIS))
    with pytest.raises(ConfigurationError, match="filter must be known in the policy worker"):
        loss(batch(), *counts(batch()), logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positive_example_nll_weight": 0.1}, "positive_example_nll_weight must be 0"),
        ({"disable_ppo_ratio": True, "ratio_clip_c": 3.0}, "ratio_clip_c must be null"),
    ],
)
def test_options_without_a_counterpart_are_refused(options, message):
    from megatron_support.adapters.context import AdapterSettings

    with pytest.raises(ConfigurationError, match=message):
        loss_config(theirs(options), AdapterSettings())


def test_fused_log_probabilities_are_refused(nemo_rl):
    with pytest.raises(ConfigurationError, match="use_fused_linear_logprobs must be false"):
        SupportLossFn(theirs(TIS), use_fused_linear_logprobs=True)


def _logprob_pass(rank, world, parallel, columns, packed):
    from megatron_support import register
    from megatron_support.megatron.parts import call_chunk

    nemo_rl = standin.installed(sys.modules)
    register("nemo_rl")
    model, groups = tiny_model(ParallelConfig.from_dict(parallel))
    sequences, bounds = list(columns["input_ids"]), None
    if packed:
        sizes = [-(-length // 4) * 4 for length in LENGTHS]
        sequences = [row[:size] for row, size in zip(sequences, sizes, strict=True)]
        bounds = torch.tensor([0, *sizes]).cumsum(0)
    with torch.no_grad():
        logits = call_chunk(model.chunks[0], token_batch(sequences, packed=packed, groups=groups))
    found = []
    for params in (SAMPLING, {"temperature": SAMPLING["temperature"]}):
        processor = nemo_rl.train.LogprobsPostProcessor({}, standin.TrainingSamplingParams(**params))
        process = processor(columns, None, bounds)
        found.append(process(logits / SAMPLING["temperature"])[1]["logprobs"])
    return found


@pytest.mark.parametrize(
    ("world", "parallel", "packed"),
    [(1, {}, False), (2, {"tensor": 2}, True), (2, {"context": 2}, True)],
    ids=["rows", "packed_tp2", "packed_cp2"],
)
def test_the_log_probability_pass_keeps_what_is_outside_the_support(world, parallel, packed):
    columns = batch()
    expected = run_ranks(1, _plain_logprobs, columns)[0]
    for filtered, unfiltered in run_ranks(world, _logprob_pass, parallel, columns, packed):
        assert torch.isneginf(filtered).any()
        torch.testing.assert_close(filtered, expected, rtol=1e-5, atol=1e-5)
        assert unfiltered == "theirs"  # reference values go NeMo-RL's own way


def _plain_logprobs(rank, world, columns):
    """Sort, cut, renormalise: written out for one process."""
    model, groups = tiny_model()
    rows = token_batch(list(columns["input_ids"]), packed=False, groups=groups)
    with torch.no_grad():
        logits = model.chunks[0](rows.input_ids, rows.position_ids, None)[:, :-1, :VOCAB] / SAMPLING["temperature"]
    top = logits.topk(SAMPLING["top_k"], dim=-1)
    mass = top.values.softmax(-1)
    kept = top.values.masked_fill(mass.cumsum(-1) - mass >= SAMPLING["top_p"], -torch.inf)
    cut = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, kept)
    found = cut.log_softmax(-1).gather(-1, columns["input_ids"][:, 1:, None]).squeeze(-1)
    wanted = (columns["token_mask"] * columns["sample_mask"][:, None])[:, 1:] != 0
    return torch.nn.functional.pad(torch.where(wanted, found, 0.0), (1, 0))


def _originals(nemo_rl):
    processors = [nemo_rl.train.LogprobsPostProcessor, nemo_rl.train.LossPostProcessor]
    estimators = [vars(nemo_rl.estimators)[name] for name in vars(nemo_rl.estimators) if name.endswith("Estimator")]
    return [
        nemo_rl.grpo.ClippedPGLossFn,
        nemo_rl.loss.ClippedPGLossFn,
        nemo_rl.grpo.compute_and_apply_seq_logprob_error_masking,
        nemo_rl.policies.resolve_policy_worker_cls,
        dict(nemo_rl.registry),
        vars(processors[0])["__call__"],
        vars(processors[1])["__init__"],
        *(vars(each)["compute_advantage"] for each in estimators),
    ]


@pytest.fixture
def registration():
    from megatron_support import register, unregister

    yield register, unregister
    unregister("nemo_rl")


def test_registering_twice_is_once_and_unregistering_gives_every_original_back(nemo_rl, registration):
    register, unregister = registration
    before = _originals(nemo_rl)
    first = register("nemo_rl")
    changed = _originals(nemo_rl)
    assert register("nemo_rl")["nemo_rl"] is first["nemo_rl"]
    assert all(one is two or one == two for one, two in zip(changed, _originals(nemo_rl), strict=True))
    assert all(one is not two and one != two for one, two in zip(before, changed, strict=True))
    assert len(first["nemo_rl"].hooked) == 5
    unregister("nemo_rl")
    assert all(one is two or one == two for one, two in zip(before, _originals(nemo_rl), strict=True))
    assert before[0] is nemo_rl.grpo.ClippedPGLossFn


def test_megatron_workers_start_from_a_module_that_registers(nemo_rl, registration):
    register, _ = registration
    register("nemo_rl")
    chosen = nemo_rl.policies.resolve_policy_worker_cls(standin.WORKER, {})
    assert chosen == "megatron_support.adapters.nemo_rl.worker.SupportPolicyWorker"
    assert nemo_rl.registry[chosen] == nemo_rl.registry[standin.WORKER]
    assert nemo_rl.policies.resolve_policy_worker_cls("another.Worker", {}) == "another.Worker"


def test_a_worker_s_module_registers_in_its_process(nemo_rl, registration, monkeypatch):
    from megatron_support.adapters.nemo_rl import WORKER

    module, _, name = WORKER.rpartition(".")
    before = vars(nemo_rl.train.LogprobsPostProcessor)["__call__"]
    monkeypatch.delitem(sys.modules, module, raising=False)
    worker = getattr(importlib.import_module(module), name)
    monkeypatch.delitem(sys.modules, module)
    assert vars(nemo_rl.train.LogprobsPostProcessor)["__call__"] is not before
    theirs = sys.modules[standin.WORKER.rpartition(".")[0]].MegatronPolicyWorkerImpl
    assert issubclass(worker, theirs)
    assert worker.options == {"runtime_env": {"of": "megatron_policy_worker"}}


def test_a_driver_without_megatron_is_hooked_where_it_can_be(monkeypatch, registration):
    register, _ = registration
    modules = dict(sys.modules)
    standin.installed(modules, worker=False)
    for name in modules.keys() - sys.modules.keys():
        monkeypatch.setitem(sys.modules, name, modules[name])
    report = register("nemo_rl")["nemo_rl"]
    assert "policy loss" in report.hooked
    assert set(report.declined) == {"log-probability pass", "filter of the loss"}


def test_a_release_without_a_symbol_is_left_as_it_was(nemo_rl, registration):
    register, _ = registration
    before = nemo_rl.grpo.ClippedPGLossFn
    del nemo_rl.estimators.OPDAdvantageEstimator
    with pytest.raises(ConfigurationError, match="OPDAdvantageEstimator does not exist"):
        register("nemo_rl")
    assert nemo_rl.grpo.ClippedPGLossFn is before


def test_the_sequence_check_leaves_excluded_tokens_out(nemo_rl, registration):
    register, _ = registration
    register("nemo_rl")
    columns = batch()
    columns["prev_logprobs"] = torch.where(
        torch.isneginf(columns["prev_logprobs"]), -torch.inf, columns["generation_logprobs"]
    )
    columns["prev_logprobs"][5, 8] += 2  # the one real error
    before = columns["prev_logprobs"].clone()
    found = nemo_rl.grpo.compute_and_apply_seq_logprob_error_masking(
        train_data=columns, rewards=torch.zeros(SEQUENCES), seq_logprob_error_threshold=1.2
    )
    assert columns["sample_mask"].tolist() == [1, 1, 0, 1, 1, 0, 1, 1]  # 2 was masked, 5 is rejected
    assert 1.2 < found["max_seq_mult_prob_error"] < 3
    assert torch.equal(columns["prev_logprobs"], before)


@pytest.mark.parametrize(
    ("name", "policy", "other"),
    [
        ("ReinforcePlusPlusAdvantageEstimator", "logprobs_policy", "logprobs_reference"),
        ("GeneralizedAdvantageEstimator", "logprobs", "reference_logprobs"),
        ("OPDAdvantageEstimator", "prev_logprobs", "teacher_logprobs"),
    ],
)
def test_kl_and_distillation_terms_are_0_outside_the_support(nemo_rl, registration, name, policy, other):
    register, _ = registration
    register("nemo_rl")
    inputs = {policy: torch.tensor([-1.0, -torch.inf]), other: torch.tensor([-1.5, -2.0])}
    found = vars(nemo_rl.estimators)[name]().compute_advantage(**inputs)
    torch.testing.assert_close(found, torch.tensor([-0.5, 0.0]))
