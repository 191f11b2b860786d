"""Reference weights take the trainer's place for a pass and always give it back."""

import pytest
import torch
from torch import nn

from megatron_support.megatron.reference import HostWeights


def _model(fill: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(fill)
    return model


def _values(model: nn.Module) -> set[float]:
    return {float(x) for t in (*model.parameters(), *model.buffers()) for x in t.flatten()}


def test_swapped_weights_are_those_of_the_copy_and_the_own_return():
    model = _model(1.0)
    reference = HostWeights([model])
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(5.0)
    storage = [p.data_ptr() for p in model.parameters()]
    with reference.swapped_into([model]):
        assert _values(model) == {1.0}
    assert _values(model) == {5.0}
    assert [p.data_ptr() for p in model.parameters()] == storage, "parameters may be views of Megatron's buffers"


def test_own_weights_return_after_an_exception():
    model = _model(1.0)
    reference = HostWeights([model])
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    with pytest.raises(RuntimeError, match="in the pass"), reference.swapped_into([model]):
        raise RuntimeError("in the pass")
    assert set(model[0].weight.flatten().tolist()) == {5.0}


def test_copy_is_frozen():
    model = _model(1.0)
    reference = HostWeights([model])
    model[0].weight.data.add_(1)
    target = _model(0.0)
    reference.copy_to([target])
    assert _values(target) == {1.0}
