"""A surrogate of your own: register it, name it in the configuration, train with it.

python examples/custom_surrogate.py
"""

from __future__ import annotations

import torch

from megatron_support import ActorLossConfig, actor_loss, register_surrogate
from megatron_support.loss import SurrogateInputs


@register_surrogate("squared_ratio")
def squared_ratio(inputs: SurrogateInputs, *, strength: float = 0.5) -> torch.Tensor:
    """-r A + strength (log r)^2: a ratio held near 1 by a penalty instead of a clip.

    Tensors are per token and sanitised; exclusion, correction and aggregation happen around this.
    """
    return strength * inputs.log_ratio.square() - inputs.ratio * inputs.advantages


def main() -> None:
    config = ActorLossConfig.from_dict({"surrogate": {"type": "squared_ratio", "strength": 0.1}})
    curr_logprobs = torch.tensor([[-0.9, -1.2, -2.3, -0.5]], requires_grad=True)
    output = actor_loss(
        config,
        curr_logprobs=curr_logprobs,
        prev_logprobs=torch.tensor([[-1.0, float("-inf"), -2.0, -0.5]]),  # the second token was filtered out
        advantages=torch.ones(1, 4),
        response_mask=torch.ones(1, 4),
    )
    output.loss.backward()
    print(f"loss {output.loss.item():.4f}, gradient {curr_logprobs.grad.tolist()}")
    print(f"excluded tokens: {output.metrics['policy_support_excluded_tokens'].compute():.0f}")


if __name__ == "__main__":
    main()
