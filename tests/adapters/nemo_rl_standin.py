"""Stand-ins for the parts of NeMo-RL that the adapter touches, by its documented contract; it is on no package index.

Checked by hand against NVIDIA-NeMo/RL at 7ea279abfbeb698b092856d0dab61e7cf39bc909.
"""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CONFIG = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
"""NeMo-RL's defaults."""
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


class MetricNormalizer(enum.Enum):
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@dataclass
class TrainingSamplingParams:
    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


class ClippedPGLossFn:
    pass


class LossPostProcessor:
    """The factors that NeMo-RL puts on a loss, and its loop over packed sequences."""

    def __init__(self, loss_fn, cfg, num_microbatches=1, cp_normalize=True, sampling_params=None):
        self.loss_fn, self.cfg, self.num_microbatches = loss_fn, cfg, num_microbatches
        self.cp_normalize, self.sampling_params = cp_normalize, sampling_params

    def __call__(self, data_dict, packed_seq_params=None, global_valid_seqs=None, global_valid_toks=None):
        from megatron.core.parallel_state import get_context_parallel_world_size

        size = get_context_parallel_world_size()
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        assert self.loss_fn.input_type is LossInputType.LOGIT

        def process(logits: Tensor):
            if packed_seq_params is None:
                loss, metrics = self.loss_fn(data=data_dict, logits=logits, **counts)
            else:
                loss, metrics = 0, {}
                lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
                bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
                for row, length in enumerate(lengths):
                    start, end = bounds[row] // size, bounds[row + 1] // size
                    one = {name: values[row : row + 1] for name, values in data_dict.items()}
                    one = {name: v[:, :length] if v.dim() > 1 else v for name, v in one.items()}
                    part, found = self.loss_fn(data=one, logits=logits.narrow(1, start, end - start), **counts)
                    loss = loss + part
                    for name, value in found.items():
                        metrics[name] = combined(name, metrics[name], value) if name in metrics else value
            loss = loss / size if self.cp_normalize else loss
            return loss * self.num_microbatches / size, metrics

        return process


class LogprobsPostProcessor:
    def __init__(self, cfg, sampling_params=None, use_fused_linear_logprobs=False):
        self.cfg, self.sampling_params = cfg, sampling_params

    def __call__(self, data_dict, input_ids, cu_seqlens_padded):
        return lambda logits: (torch.zeros(()), {"logprobs": "theirs"})


def combined(name: str, one: float, other: float) -> float:
    """How NeMo-RL puts two values of a metric together."""
    if name in ("probs_ratio_min", "probs_ratio_clamped_min"):
        return min(one, other)
    if name in ("probs_ratio_max", "probs_ratio_clamped_max"):
        return max(one, other)
    return one + other


def sequence_errors(train_data, rewards, seq_logprob_error_threshold):
    """NeMo-RL's sequence-level check: the mean of exp|generation - previous| over a sequence's tokens."""
    mask = train_data["token_mask"][:, 1:] * train_data["sample_mask"][:, None]
    error = (train_data["generation_logprobs"] - train_data["prev_logprobs"])[:, 1:].abs()
    mean = (torch.exp(error * mask) * mask).sum(1) / mask.sum(1).clamp(min=1)
    train_data["sample_mask"] = (mean <= seq_logprob_error_threshold).float() * train_data["sample_mask"]
    return {"max_seq_mult_prob_error": mean.max().item()}


def estimator(policy: str, other: str) -> type:
    """An advantage estimator whose advantage is the difference of the two log-probabilities it is given."""

    class Estimator:
        def compute_advantage(self, **inputs):
            return inputs[other] - inputs[policy]

    return Estimator


def installed(modules: dict[str, Any], *, worker: bool = True) -> types.SimpleNamespace:
    """Put the stand-ins among imported modules. ``worker`` adds what imports Megatron-Core."""

    def module(name: str, **contents: Any) -> types.ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            if full not in modules or not full.startswith("nemo_rl"):
                modules[full] = types.ModuleType(full)
                modules[full].__path__ = []
        vars(modules[name]).update(contents)
        return modules[name]

    module("nemo_rl.algorithms.loss.interfaces", LossType=LossType, LossInputType=LossInputType)
    modules["nemo_rl.algorithms.loss.interfaces"].MetricNormalizer = MetricNormalizer
    loss = module("nemo_rl.algorithms.loss", ClippedPGLossFn=ClippedPGLossFn)
    grpo = module("nemo_rl.algorithms.grpo", ClippedPGLossFn=ClippedPGLossFn)
    grpo.compute_and_apply_seq_logprob_error_masking = sequence_errors
    estimators = module(
        "nemo_rl.algorithms.advantage_estimator",
        ReinforcePlusPlusAdvantageEstimator=estimator("logprobs_policy", "logprobs_reference"),
        GeneralizedAdvantageEstimator=estimator("logprobs", "reference_logprobs"),
        OPDAdvantageEstimator=estimator("prev_logprobs", "teacher_logprobs"),
    )
    policies = module("nemo_rl.models.policy.lm_policy", resolve_policy_worker_cls=lambda fqn, config: fqn)
    registry = {WORKER: "an interpreter"}
    module("nemo_rl.distributed.ray_actor_environment_registry", ACTOR_ENVIRONMENT_REGISTRY=registry)
    module("nemo_rl.models.policy.utils", get_runtime_env_for_policy_worker=lambda name: {"of": name})
    module(WORKER.rpartition(".")[0], MegatronPolicyWorkerImpl=type("MegatronPolicyWorkerImpl", (), {}))
    train = None
    if worker:
        train = module("nemo_rl.models.megatron.train")
        train.LossPostProcessor = type("LossPostProcessor", (), dict(vars(LossPostProcessor)))
        train.LogprobsPostProcessor = type("LogprobsPostProcessor", (), dict(vars(LogprobsPostProcessor)))
    else:
        modules["nemo_rl.models.megatron.train"] = None
    ray = types.ModuleType("ray")
    ray.remote = lambda **options: lambda actor: type(actor.__name__, (actor,), {"options": options})
    modules["ray"] = ray
    return types.SimpleNamespace(
        grpo=grpo, loss=loss, estimators=estimators, policies=policies, registry=registry, train=train
    )
