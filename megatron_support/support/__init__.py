"""Log-probabilities under the sampler's filter, from vocabulary-parallel logits."""

from megatron_support.support.api import support_logprobs
from megatron_support.support.comparison import compare_supports
from megatron_support.support.full_vocabulary import previous_logprobs, token_logprobs

__all__ = ["compare_supports", "previous_logprobs", "support_logprobs", "token_logprobs"]
