"""The number by which ranks compare their batches."""

import pytest
import torch

from megatron_support.megatron.same_rollouts import checksum

VALUES = {
    "float": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
    "int": torch.arange(1000) % 7,
    "bool": torch.arange(1000) % 3 == 0,
}


@pytest.mark.parametrize("kind", VALUES)
def test_any_change_changes_it(kind):
    values = VALUES[kind]
    own = checksum(values)
    assert own == checksum(values.clone()) and -1 < own < 2**62
    changed = []
    for place in range(0, 1000, 7):
        other = values.clone()
        other[place] = ~other[place] if kind == "bool" else other[place] + 1
        changed.append(checksum(other))
    changed += [checksum(values.roll(1)), checksum(values[:-1]), checksum(torch.cat([values, values[:1] * 0]))]
    assert own not in changed and len(set(changed)) == len(changed)


def test_nan_infinities_and_nothing_have_numbers_of_their_own():
    numbers = [checksum(torch.tensor([value])) for value in (0.0, -0.0, float("nan"), float("inf"), -float("inf"))]
    numbers += [checksum(None), checksum(torch.zeros(0)), checksum(torch.zeros(2))]
    assert len(set(numbers)) == len(numbers)
