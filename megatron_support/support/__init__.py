"""Log-probabilities under the sampler's filter, from vocabulary-parallel logits."""

from megatron_support.support.api import support_logprobs
from megatron_support.support.comparison import compare_supports
from megatron_support.support.full_vocabulary import previous_logprobs, token_logprobs
from megatron_support.support.fused_head import fused_support_logprobs
from megatron_support.support.replay import check_support, packed_names

__all__ = [
    "check_support",
    "compare_supports",
    "fused_support_logprobs",
    "packed_names",
    "previous_logprobs",
    "support_logprobs",
    "token_logprobs",
]
