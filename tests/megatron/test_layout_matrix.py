"""One gradient: every layout, packing and split gives loss, metrics, support and gradients of one process (fp32).

A layout's ranks are forked once and run three losses x two normalisations x packed and padded. By default the layouts
are those of up to four ranks; ``--full`` runs those of up to eight.
"""

import itertools

import pytest
import torch

from tests.megatron.actor_setup import make_step
from tests.megatron.layouts import BUDGET, OPTIMIZER, RECOMPUTE, all_layouts, small_layouts
from tests.megatron.matrix import (
    LOSSES,
    NORMALIZATIONS,
    TOLERANCE,
    boundary_distance,
    loss_of,
    mixed_rollouts,
    run_layout,
    run_steps,
)
from tests.ranks import run_ranks

EXPECTED = [(loss, normalization) for loss in LOSSES for normalization in NORMALIZATIONS]


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        layouts = all_layouts() if metafunc.config.getoption("--full") else small_layouts()
        metafunc.parametrize("layout", layouts, ids=lambda layout: layout.name)


@pytest.fixture(scope="module")
def one_process():
    configs = {key: {"loss": loss_of(*key), "microbatch": {"max_tokens": 64}} for key in EXPECTED}
    return run_ranks(1, run_steps, {}, configs)[0]


def test_every_layout_is_one_process(one_process, layout):
    names = set(next(iter(one_process.values())).gradients)
    ranks = run_ranks(layout.world, run_layout, layout, one_process)
    for key in ranks[0]:
        expected = one_process[key[:2]]
        for found in (differences[key] for differences in ranks):
            assert found.worst <= TOLERANCE, f"{key}: gradient of {found.where} differs by {found.worst:.1e}"
            assert not found.support, f"{key}: tokens {found.support} change sides of the support"
            assert found.metrics == pytest.approx(expected.metrics, rel=2e-5, abs=1e-6), key
        assert set().union(*(differences[key].seen for differences in ranks)) == names, key


def test_the_losses_are_different_and_exclude_tokens(one_process):
    """Otherwise the comparison above says less than it seems to."""
    losses = [outcome.metrics["loss"] for outcome in one_process.values()]
    assert len({round(loss, 5) for loss in losses}) == len(EXPECTED)
    for outcome in one_process.values():
        assert outcome.metrics["policy_support_excluded_tokens"] > 3


def _boundary_distance(rank, world):
    step = make_step()
    return boundary_distance(step, mixed_rollouts())


def test_inputs_hold_no_token_at_the_border_of_its_support(one_process):
    """Sums are reordered between layouts, which moves a log-probability by 1e-5 at most (asserted above and here)."""
    distance = run_ranks(1, _boundary_distance)[0]
    close = (distance < 1e-4).nonzero().flatten().tolist()
    assert not close, f"{len(close)} boundary tokens: {[(i, float(distance[i])) for i in close]}"
    outside = torch.isneginf(next(iter(one_process.values())).previous)
    assert (distance[outside] < torch.inf).all() and outside.sum() > 3


def test_every_setting_and_every_two_kinds_of_parallelism_meet_on_four_ranks():
    assert len(all_layouts()) >= 40 and len({layout.name for layout in all_layouts()}) == len(all_layouts())
    small = small_layouts()
    for kinds in itertools.combinations(("tensor", "pipeline", "virtual_pipeline", "context", "data"), 2):
        assert any(all((getattr(layout, kind) or 1) > 1 for kind in kinds) for layout in small), kinds
    assert {layout.recompute for layout in small} == set(range(len(RECOMPUTE)))
    assert {layout.optimizer for layout in small} == set(range(len(OPTIMIZER)))
    assert {layout.budget for layout in small} == set(BUDGET)
    flags = itertools.product((False, True), repeat=3)
    assert {(layout.sequence, layout.fused_head, layout.per_token) for layout in small} == set(flags)
