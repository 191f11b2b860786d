"""NeMo-RL's Megatron policy worker, whose process registers this host before it makes a model. Needs NeMo-RL."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from megatron_support.adapters.registry import register

register("nemo_rl")


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class SupportPolicyWorker(MegatronPolicyWorkerImpl):
    """NeMo-RL's worker; what differs is what its module has imported."""
