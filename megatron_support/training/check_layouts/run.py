"""A check from one process to the last layout, on ranks that torchrun started or that are forked here."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console

from megatron_support.config.layout import validate_layout
from megatron_support.config.recipe import Architecture, ParallelConfig, Recipe
from megatron_support.distributed.errors import raise_together
from megatron_support.errors import ConfigurationError, Fault, RolloutError
from megatron_support.megatron.host import Host, running_alone, setup_host, start_distributed, stop_distributed
from megatron_support.megatron.minibatch import truncate_rollouts
from megatron_support.megatron.parallel import destroy_parallel, initialize_parallel
from megatron_support.megatron.weights import model_architecture
from megatron_support.rollouts.batch import RolloutBatch
from megatron_support.training.build import build_training
from megatron_support.training.check_layouts.boundary import boundary_tokens, with_tokens_outside
from megatron_support.training.check_layouts.compare import Row, compare
from megatron_support.training.check_layouts.layouts import Case, Layout, cases_of, layouts_that_fit
from megatron_support.training.check_layouts.measure import Bench, Measurement, build_bench
from megatron_support.training.check_layouts.problem import (
    Problem,
    budgets_of,
    own_problem,
    own_rollouts,
    recipe_problem,
    with_drawn_rewards,
)
from megatron_support.training.check_layouts.report import Report, print_report, require_writable, write_json
from megatron_support.training.checks import CheckedRecipe, check_recipe

BOUNDARY_TOLERANCE = 1e-4
"""How far logits and probabilities of two layouts may be apart, generously."""

_OUTSIDE_EVERY = 4
"""One sequence in so many of a recipe's batch ends with a token outside the support."""

_EXPECTED = (ConfigurationError, RolloutError, Fault)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for."""

    recipe: Recipe | None = None
    """None for the built-in model."""
    full: bool = False
    own_layout: bool = False
    """The recipe's layout alone."""
    json_path: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """What one process found out and every rank needs to know."""

    architecture: Architecture
    rollouts: RolloutBatch
    """Without boundary tokens in the responses."""
    boundary: int


def check(request: Request, host: Host, join: Callable[[], None], console: Console) -> bool:
    """Run one process, then every layout; rank 0 prints. Collective.

    Args:
        request: the user's.
        host: from :func:`setup_host`.
        join: brings torch.distributed up over all ranks.
        console: rank 0 prints on it.

    Returns:
        Whether every layout agrees with one process; the same on every rank.

    Raises:
        ConfigurationError, RolloutError, Fault: what the one process met, on every rank.
    """
    # DistributedOptimizer looks at the gradient of a view, which has none, and goes on
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    gc.freeze()  # modules stay; what a layout leaves behind is collected after it, on GPUs to free their memory
    problem = own_problem() if request.recipe is None else recipe_problem(request.recipe)
    expected: dict[str, Measurement] = {}
    shared, error = None, None
    world = int(os.environ.get("WORLD_SIZE", "1"))
    is_main = os.environ.get("RANK", "0") == "0"
    status: AbstractContextManager[Any] = console.status("one process") if is_main else nullcontext()
    with status as line:
        if is_main:
            try:
                if request.json_path is not None:
                    require_writable(request.json_path)
                shared, expected = _one_process(problem, request, host, world)
            except _EXPECTED as found:
                error = found
        join()
        try:
            raise_together(error, dist.group.WORLD, host.device)
            shared = _broadcast(shared, host)
            rows = []
            for index, (layout, cases) in enumerate(works := _works(problem, request, shared, world)):
                if line is not None:
                    line.update(f"{index + 1}/{len(works)} {layout.describe(world)}")
                rows += _run_layout(problem, shared, layout, cases, expected, world)
            agreed = _broadcast(all(row.ok for row in rows), host)
        finally:
            stop_distributed()
    if is_main:
        report = _report(shared, expected, rows, host, world)
        print_report(report, console)
        if request.json_path is not None:
            write_json(report, request.json_path)
    return agreed


def check_forked(request: Request, world: int) -> int:
    """:func:`check` on CPU ranks that are forked here: Megatron-Core is imported once for all of them.

    Returns:
        0; 1 where a layout differs; 2 where the input is at fault, after rank 0 has said so.
    """
    answers = mp.get_context("fork").Array("i", world)
    with tempfile.TemporaryDirectory(prefix="megatron-support-check-") as folder:
        mp.start_processes(_forked_rank, args=(world, folder, request, answers), nprocs=world, start_method="fork")
    return max(answers[rank] for rank in range(world))


def _forked_rank(rank: int, world: int, folder: str, request: Request, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    if rank > 0:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
    host = setup_host("cpu")

    def join() -> None:
        meeting = f"file://{Path(folder) / 'rendezvous'}"
        dist.init_process_group(host.backend, init_method=meeting, rank=rank, world_size=world)

    try:
        answers[rank] = int(not check(request, host, join, Console()))
    except _EXPECTED as error:
        answers[rank] = 2
        if rank == 0:
            sys.stderr.write(f"error: {error}\n")


def check_started(request: Request) -> int:
    """:func:`check` on the ranks that torchrun started, of which this is one."""
    host = setup_host("auto" if request.recipe is None else request.recipe.device)
    return int(not check(request, host, lambda: start_distributed(host), Console()))


def _one_process(problem: Problem, request: Request, host: Host, world: int) -> tuple[_Shared, dict[str, Measurement]]:
    """The batch without boundary tokens, and each loss, on this rank alone."""
    alone = Layout(parallel=ParallelConfig())
    if request.recipe is None:
        architecture, rollouts = model_architecture(problem.recipe.model), own_rollouts()
    else:
        check_recipe(request.recipe, world)
        architecture, rollouts = _recipe_rollouts(problem, host)
    with running_alone(host):
        groups = initialize_parallel(alone.parallel)
        bench = build_bench(problem, architecture, rollouts, alone, groups)
        model = bench.training.model
        boundary = torch.zeros_like(rollouts.response_mask)
        if problem.recipe.logprobs.support == "recompute":
            if request.recipe is not None:
                rollouts = with_tokens_outside(model, rollouts, problem.reference, groups, every=_OUTSIDE_EVERY)
            boundary = boundary_tokens(model, rollouts, problem.reference, groups, BOUNDARY_TOLERANCE)
        pruned = rollouts.with_columns(response_mask=rollouts.response_mask & ~boundary)
        bench = replace(bench, rollouts=pruned)
        expected = {name: bench.measure(Case(loss=name, microbatch=problem.reference)) for name in problem.losses}
    del bench, model
    gc.collect()
    shared = _Shared(architecture=architecture, rollouts=pruned, boundary=int(boundary.sum()))
    return shared, expected


def _recipe_rollouts(problem: Problem, host: Host) -> tuple[Architecture, RolloutBatch]:
    """The first rows of the recipe's files, or responses that its model samples, with drawn rewards."""
    recipe = problem.recipe.model_copy(update={"parallel": ParallelConfig()})
    checked: CheckedRecipe = check_recipe(recipe, 1)
    with running_alone(host):
        groups = initialize_parallel(recipe.parallel)
        rollouts = build_training(checked, groups, lambda name, done, total: None).source.rollouts(0)
    rollouts, _ = truncate_rollouts(rollouts, recipe.train.microbatch, total_multiple=1)
    return checked.architecture, with_drawn_rewards(rollouts)


def _works(problem: Problem, request: Request, shared: _Shared, world: int) -> list[tuple[Layout, list[Case]]]:
    """Layouts with their steps: all that fit, after a recipe's own."""
    losses = tuple(problem.losses)
    works: list[tuple[Layout, list[Case]]] = []
    if request.recipe is not None:
        own = Layout(parallel=request.recipe.parallel, distributed_optimizer=request.recipe.optimizer.distributed)
        works = [(own, [Case(loss=name, microbatch=problem.reference) for name in losses])]
        if request.own_layout:
            return works
    layouts = layouts_that_fit(
        world, lambda parallel: validate_layout(shared.architecture, parallel, world), full=request.full
    )
    budgets = budgets_of(problem, shared.rollouts.lengths, world)
    for index, layout in enumerate(layouts):
        cases = cases_of(index, losses, budgets, full=request.full)
        if request.recipe is not None and not request.full:
            cases = cases[:1]
        if works and layout == works[0][0]:
            cases = [case for case in cases if case not in works[0][1]]
        works.append((layout, cases))
    return [(layout, cases) for layout, cases in works if cases]


def _run_layout(
    problem: Problem,
    shared: _Shared,
    layout: Layout,
    cases: list[Case],
    expected: dict[str, Measurement],
    world: int,
) -> list[Row]:
    """All steps of a layout; rows on rank 0. An error is met by all ranks together and ends up in its row."""
    groups = initialize_parallel(layout.parallel)
    bench: Bench | None = None
    rows = []
    for case in cases:
        row = Row(layout=layout.describe(world), batch=case.describe(), loss_name=case.loss)
        began = time.perf_counter()
        try:
            bench = bench or build_bench(problem, shared.architecture, shared.rollouts, layout, groups)
            found = bench.measure(case)
        except _EXPECTED as error:
            failed = replace(row, seconds=time.perf_counter() - began, problems=(str(error),))
            rows += [failed] if groups.is_main else []
            continue
        if groups.is_main:
            rows.append(compare(row, expected[case.loss], found, shared.rollouts.response_mask))
    del bench
    destroy_parallel()
    gc.collect()
    return rows


def _broadcast(value: Any, host: Host) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0, device=host.device)
    return box[0]


def _report(shared: _Shared, expected: dict[str, Measurement], rows: list[Row], host: Host, world: int) -> Report:
    architecture = shared.architecture
    kind = "GPU" if host.uses_gpu else "CPU"
    first = next(iter(expected.values()))
    ranks = f"{world} {kind} rank{'s' if world > 1 else ''}"
    return Report(
        world=world,
        model=f"{ranks}, {architecture.num_layers} layers of {architecture.hidden_size}, float32",
        sequences=shared.rollouts.num_sequences,
        response_tokens=int(shared.rollouts.response_mask.sum()),
        excluded_tokens=int(first.metrics.get("policy_support_excluded_tokens", 0)),
        boundary_tokens=shared.boundary,
        rows=tuple(rows),
    )
