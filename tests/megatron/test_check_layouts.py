"""``megatron-support check``: layouts agree with one process, and a broken scaling factor is found."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatron_support.__main__ import main
from megatron_support.config.recipe import MicrobatchConfig, ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron import loss_function
from megatron_support.megatron.gradients import WholeGradients
from megatron_support.training.check_layouts.boundary import near_boundary
from megatron_support.training.check_layouts.compare import Row, compare
from megatron_support.training.check_layouts.layouts import Budgets, cases_of, layouts_that_fit
from megatron_support.training.check_layouts.measure import Measurement
from megatron_support.training.check_layouts.problem import budgets_of, own_problem
from megatron_support.training.check_layouts.report import Report, print_report
from megatron_support.types import SamplingParams
from tests import no_files

ROOT = Path(__file__).parents[2]


def accept(parallel):
    """A model that fits every layout."""


def test_two_ranks_agree_with_one_process(tmp_path, capfd):
    assert main(["check", "--world", "2", "--json", str(tmp_path / "check.json")]) == 0
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["ok"] and report["world"] == 2 and report["excluded_tokens"] > 10
    rows = report["rows"]
    layouts = {row["layout"] for row in rows}
    assert layouts == {"DP2", "DP2 DistOpt", "TP2", "TP2 SP", "PP2", "PP2 VPP2", "CP2 DistOpt"}
    assert {row["loss_name"] for row in rows} == {"token", "GSPO"}
    assert {row["batch"].split()[0] for row in rows} == {"packed", "padded"}
    for row in rows:
        assert row["ok"] and row["support_differs"] == 0
        assert row["gradient_difference"] < 2e-6, "another order of sums, and no more than that"
    assert max(row["gradient_difference"] for row in rows) > 0
    out = capfd.readouterr().out
    assert out.count("TP2 SP") == 2 and f"{len(rows)} steps, 0 differ" in out, "one rank prints, once"


RECIPE = """
name: own
device: cpu
model:
  architecture: {vocab_size: 259, num_layers: 2, hidden_size: 32, num_attention_heads: 2, ffn_hidden_size: 64}
  dtype: bfloat16
parallel: {tensor: 2}
optimizer: {lr: 0.001}
rollouts:
  type: sampler
  task: swap
  prompts_per_step: 3
  samples_per_prompt: 4
  max_new_tokens: 3
  sampling: {top_k: 160, top_p: 0.9}
loss: {ratio_level: sequence}
train: {steps: 1, microbatch: {max_tokens: 32}}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "own.yaml").write_text(RECIPE)
    return ["--recipe", str(tmp_path / "own.yaml")]


def table(folder: Path) -> tuple[dict, list[dict]]:
    report = json.loads((folder / "check.json").read_text())
    return report, report["rows"]


@pytest.mark.parametrize("whose", ["built-in", "recipe"])
def test_a_wrong_scaling_factor_is_found(whose, recipe, monkeypatch, tmp_path):
    """Without the data-parallel size in it, gradients are halved on two data-parallel ranks and right elsewhere."""
    right = loss_function.loss_factor

    def forgets_ranks(**sizes):
        return right(**(sizes | {"data_parallel_size": 1}))

    monkeypatch.setattr(loss_function, "loss_factor", forgets_ranks)
    chosen = recipe if whose == "recipe" else []
    assert main(["check", "--world", "2", *chosen, "--json", str(tmp_path / "check.json")]) == 1
    report, rows = table(tmp_path)
    assert not report["ok"] and {row["layout"] for row in rows} >= {"DP2", "DP2 DistOpt", "TP2", "PP2", "CP2 DistOpt"}
    for row in rows:
        assert row["ok"] == (not row["layout"].startswith("DP2")), row
        if not row["ok"]:
            assert row["gradient_difference"] == pytest.approx(0.5, abs=1e-4)
            assert any("gradient of" in problem for problem in row["problems"])


def test_a_recipe_under_torchrun_is_checked_under_each_layout_that_fits(recipe, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = ["-m", "megatron_support", "check", *recipe, "parallel.sequence=true"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "0"]
    done = subprocess.run(
        [*torchrun, *rendezvous, *command, "--json", str(tmp_path / "check.json")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report, rows = table(tmp_path)
    # its own, then the others; the second "TP2 SP" cuts the batch into several microbatches
    layouts = ["TP2 SP", "DP2", "DP2 DistOpt", "TP2", "TP2 SP", "CP2 DistOpt", "PP2"]
    assert [row["layout"] for row in rows] == layouts
    assert report["sequences"] == 12 and report["excluded_tokens"] >= 3, "one sequence in four ends outside"
    for row in rows:
        assert row["loss_name"] == "recipe" and row["support_differs"] == 0 and row["gradient_difference"] < 5e-6


def test_files_are_truncated_once_for_all_layouts(recipe, tmp_path):
    """12 tokens to 8, of which 6 are of the response; 10 would not divide by the 4 of context parallelism."""
    rows = [
        {
            "id": f"{number}",
            "prompt_id": number // 2,
            "tokens": [97 + number, 98, *range(99, 109)],
            "response_mask": [0, 0] + [1] * 10,
            "generation_logprobs": [0.0, 0.0] + [-2.0] * 10,
            "reward": 1.0,
            "sampling": {"temperature": 1.0, "top_k": 100, "top_p": 0.9},
        }
        for number in range(4)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = [
        f"rollouts={{type: files, paths: [{tmp_path / 'rollouts.jsonl'}], sequences_per_step: 4}}",
        "train.microbatch={max_tokens: 10, truncate: true}",
        "parallel={context: 2}",
    ]
    assert main(["check", "--world", "2", "--own-layout", *recipe, *fields, "--json", str(tmp_path / "x.json")]) == 2
    fields[1] = "train.microbatch={max_tokens: 8, truncate: true}"
    assert (
        main(["check", "--world", "2", "--own-layout", *recipe, *fields, "--json", str(tmp_path / "check.json")]) == 0
    )
    report, found = table(tmp_path)
    assert [row["layout"] for row in found] == ["CP2"]
    assert report["sequences"] == 4 and report["response_tokens"] + report["boundary_tokens"] == 4 * 6


def test_bad_requests_are_refused(tmp_path, capfd, monkeypatch):
    assert main(["check", "parallel.tensor=2"]) == 2
    assert "need --recipe" in capfd.readouterr().err
    assert main(["check", "--own-layout"]) == 2
    assert "--own-layout needs --recipe RECIPE" in capfd.readouterr().err
    assert main(["check", "--world", "1", "--json", str(tmp_path / "missing" / "x.json")]) == 2
    capfd.readouterr()
    for kind in no_files.KINDS:
        with no_files.standing(tmp_path / "x.json", kind):
            assert main(["check", "--world", "1", "--json", str(tmp_path / "x.json")]) == 2
        assert "what is there is no regular file" in capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["check", "--world", "2"]) == 2
    assert "drop --world" in capfd.readouterr().err


def test_layouts_cover_what_fits():
    """Of 4 ranks: 10 ways to divide them over tensor, pipeline, context and data; with sequence parallelism and
    interleaving where they are possible 19; one of them under both optimizers."""
    layouts = layouts_that_fit(4, accept)
    assert len(layouts) == 20 and len({layout.parallel.model_dump_json() for layout in layouts}) == 19
    assert [layout.describe(4) for layout in layouts[:2]] == ["DP4", "DP4 DistOpt"]
    names = [layout.describe(8) for layout in layouts_that_fit(8, accept)]
    assert any(name.startswith("TP2 PP2 VPP2 CP2 SP") for name in names) and len(set(names)) == len(names)

    def no_pipeline(parallel: ParallelConfig):
        if parallel.pipeline > 1:
            raise ConfigurationError("parallel.pipeline must be 1")

    assert {layout.parallel.pipeline for layout in layouts_that_fit(8, no_pipeline)} == {1}


def test_four_layouts_have_every_loss_packing_and_budget():
    budgets = Budgets(small=10, whole=99)
    seen = {(case.loss, case.describe()) for index in range(4) for case in cases_of(index, ("a", "b"), budgets)}
    every = {(case.loss, case.describe()) for case in cases_of(0, ("a", "b"), budgets, full=True)}
    assert seen == every and len(every) == 8
    assert {case.loss for case in cases_of(3, ("a", "b"), budgets)} == {"a", "b"}


def test_budgets_hold_the_longest_sequence_padded_for_any_layout():
    """Multiples of 2 x 4: 13 tokens become 16. A quarter of 8 x 13 tokens is 26."""
    problem = own_problem()
    lengths = torch.tensor([13, 5])
    assert budgets_of(problem, lengths, 4) == Budgets(small=16, whole=4096)
    assert budgets_of(problem, torch.tensor([13] * 8), 4) == Budgets(small=26, whole=4096)
    tight = replace(problem, reference=MicrobatchConfig(max_tokens=13))
    assert budgets_of(tight, lengths, 4) == Budgets(small=16, whole=16)


def test_boundary_tokens_worked_out_by_hand():
    """Probabilities 0.5, 0.3, 0.15, 0.05 in each row; the mass strictly above is 0, 0.5, 0.8, 0.95."""
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4, 1)
    targets = torch.arange(4)
    near = lambda sampling, tolerance=1e-3: near_boundary(logits, targets, sampling, tolerance).tolist()
    assert near(SamplingParams(top_p=0.8005)) == [False, False, True, False]
    assert near(SamplingParams(top_p=0.82)) == [False] * 4
    # top-k 2 is decided between 0.3 and 0.15: log 2 apart, reached by a tolerance of half of that
    assert near(SamplingParams(top_k=2)) == [False] * 4
    assert near(SamplingParams(top_k=2), 0.35) == [False, True, True, False]
    # top-p on the renormalised top-k: 0.5 / 0.8 = 0.625 above the second
    assert near(SamplingParams(top_k=2, top_p=0.6255)) == [False, True, False, False]
    # a neighbour within reach could stand above: 0.5 + 0.15 or 0.5 above the second
    close = torch.tensor([[0.5, 0.25, 0.2499, 0.0001]]).log()
    assert near_boundary(close, torch.tensor([1]), SamplingParams(top_p=0.7), 1e-3).tolist() == [True]
    assert near_boundary(close, torch.tensor([1]), SamplingParams(top_p=0.8), 1e-3).tolist() == [False]
    assert near_boundary(close, torch.tensor([-1]), SamplingParams(top_p=0.7), 1e-3).tolist() == [False]


def measurement(gradient=(1.0, -4.0), logprobs=(-1.0, -torch.inf, -2.0), loss=0.5, **more):
    gradients = WholeGradients(tensors={"w": torch.tensor(gradient)}, disagreement=more.get("disagreement", 0.0))
    values = {"loss": loss, "excluded": 1.0}
    return Measurement(loss=loss, metrics=values, logprobs=torch.tensor(logprobs), gradients=gradients, seconds=0.0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gradient": (1.0, -4.0001)}, "gradient of w"),
        ({"gradient": (torch.nan, -4.0)}, "gradient of w"),
        ({"disagreement": 1e-3}, "gradient of a rank's own copy"),
        ({"logprobs": (-1.001, -torch.inf, -2.0)}, "log-probabilities"),
        ({"logprobs": (-1.0, -3.0, -2.0)}, "support of 1 tokens"),
        ({"loss": 0.50002}, "metric loss"),
    ],
)
def test_each_difference_is_named(changes, problem):
    mask = torch.tensor([True, True, True])
    row = Row(layout="TP2", batch="packed 8", loss_name="token")
    assert compare(row, measurement(), measurement(), mask) == replace(
        row, loss=0.5, gradient_difference=0.0, logprob_difference=0.0, support_differs=0
    )
    assert compare(row, measurement(), measurement(**changes), mask).problems == (problem,)
    if "logprobs" in changes:
        assert compare(row, measurement(), measurement(**changes), torch.zeros_like(mask)).ok


@pytest.mark.parametrize(("width", "shown"), [(80, False), (140, True)])
def test_a_narrow_terminal_leaves_out_columns_and_cuts_none(width, shown):
    rows = (
        Row(layout="PP2 VPP2 DP2 DistOpt", batch="padded 4096", loss_name="recipe", loss=0.5, gradient_difference=0.0,
            logprob_difference=0.0, support_differs=0),
        Row(layout="TP2", batch="packed 28", loss_name="token", problems=("gradient of a[0]: 0.3",)),
    )  # fmt: skip
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    counts = {"sequences": 2, "response_tokens": 4, "excluded_tokens": 1, "boundary_tokens": 0}
    print_report(Report(world=2, model="m", rows=rows, **counts), out)
    text = out.file.getvalue()
    assert "PP2 VPP2 DP2 DistOpt  padded 4096" in text and "DIFFERS" in text and "…" not in text
    assert "TP2, packed 28, token: gradient of a[0]: 0.3\n" in text
    assert ("seconds" in text) == ("+0.500000" in text) == shown
    assert max(map(len, text.splitlines())) <= width
