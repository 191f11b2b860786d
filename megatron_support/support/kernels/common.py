"""What the kernels share: reading scaled logits, integers that order as floats do, and the K-th largest of them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
DEPTH = tl.constexpr(-104.0)
"""exp of this is 0 in float32; bounds the distance to the maximum, so that 0 * distance is 0 at -inf."""

KEYS = tl.constexpr(1 << 32)


@triton.jit
def load_scaled(logits, place, inside, temperature, entry, SCALED: tl.constexpr):
    """Scaled float32 logits, -inf outside: divided as plain torch divides, so that thresholds agree to the last bit."""
    x = tl.load(logits + place, mask=inside, other=-float("inf")).to(tl.float32)
    if SCALED:
        x = tl.where(inside, tl.div_rn(x, tl.load(temperature + entry)), -float("inf"))
    return x


@triton.jit
def order_key(x):
    """int64 in ``[0, 2^32)`` that order as the float32 values do; the two zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000


@triton.jit
def kth_largest(keys, inside, COUNT: tl.constexpr):
    """The largest key that at least COUNT keys reach, bit by bit; 0 where there are fewer."""
    answer = tl.full([], 0, tl.int64)
    step = tl.full([], KEYS, tl.int64)
    for _ in range(32):
        step = step // 2
        reached = tl.sum(tl.where(inside & (keys >= answer + step), 1, 0), 0)
        answer = tl.where(reached >= COUNT, answer + step, answer)
    return answer
