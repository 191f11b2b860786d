"""The benchmark of support log-probabilities: its contestants do the same work, and a quick run fills its tables."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from benchmarks.contestants import FUSED, HEAD_FIRST, IN_PLACE, OURS, SORT, find_contestants  # noqa: E402
from benchmarks.device import copy_bandwidth, device_table  # noqa: E402
from benchmarks.measure import Measured, ratio  # noqa: E402
from benchmarks.work import Work, make_inputs  # noqa: E402

WORK = Work(vocabulary=500, tokens=6)


def value_and_gradients(name: str, work: Work) -> tuple[torch.Tensor, list[torch.Tensor]]:
    tensors = make_inputs(work).fresh()
    run = find_contestants([name])[0][name]
    value = run(tensors, make_inputs(work).targets, work, None)
    gradients = list(torch.autograd.grad(value, tensors, allow_unused=True))
    if gradients[-1] is None or not gradients[-1].any():
        gradients[-1] = tensors[-1].main_grad
    return value.detach(), gradients


@pytest.mark.parametrize("kind", ["peaked", "broad", "flat"])
@pytest.mark.parametrize("filters", [(None, 1.0, False), (None, 1.0, True), (20, 0.9, False), (None, 0.9, False)])
def test_contestants_from_logits_agree(kind, filters):
    work = replace(WORK, kind=kind, top_k=filters[0], top_p=filters[1], entropy=filters[2])
    value, gradients = value_and_gradients(OURS, work)
    for name in (IN_PLACE, SORT):
        other, theirs = value_and_gradients(name, work)
        torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("filters", [(None, 1.0), (20, 0.9)])
@pytest.mark.parametrize("response", [1.0, 0.5])
def test_contestants_with_a_head_agree(filters, response):
    work = replace(WORK, hidden=64, top_k=filters[0], top_p=filters[1], response=response)
    value, gradients = value_and_gradients(HEAD_FIRST, work)
    other, theirs = value_and_gradients(FUSED, work)
    torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs, gradients, rtol=1e-4, atol=1e-5)


def test_a_ratio_is_the_median_over_shared_turns():
    """Ours 1, 2, 4; the other's two turns 3, 4: ratios 3 and 2, median 2.5."""
    ours = Measured(forward=[1.0, 1.0, 3.0], backward=[0.0, 1.0, 1.0])
    assert ratio(ours, Measured(forward=[2.0, 4.0], backward=[1.0, 0.0])) == 2.5


def test_a_device_table_divides_by_what_moving_the_logits_takes(monkeypatch):
    """2 MiB a millisecond of copying: 512 KiB of logits take 0.25 ms to read, 0.5 ms to read and write."""
    monkeypatch.setattr("benchmarks.device.copy_bandwidth", lambda *_: 2.0 * 2**20)
    work = Work(vocabulary=2**15, tokens=8, dtype="bf16", top_k=20)
    lines = device_table([work, replace(work, top_k=None, entropy=True)], torch.device("cpu"), 1)
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| 32768")]
    assert [(row[4], row[5]) for row in cells] == [
        *(("top_k 20", name) for name in (OURS, IN_PLACE)),
        *(("no filter, entropy", name) for name in (OURS, IN_PLACE)),
    ]
    for row in cells:
        assert float(row[7][:-1]) == pytest.approx(float(row[6]) / 0.25, abs=0.05)
        assert float(row[9][:-1]) == pytest.approx(float(row[8]) / 0.5, abs=0.05)


def test_a_copy_counts_what_is_read_and_written(monkeypatch):
    monkeypatch.setattr("benchmarks.device.timed", lambda call, device: (call(), 0.5))
    assert copy_bandwidth(1000, torch.device("cpu"), 2) == 4000


def test_a_quick_run_writes_tables_and_a_picture(tmp_path):
    out, picture = tmp_path / "support.md", tmp_path / "support.svg"
    command = [sys.executable, str(ROOT / "scripts/bench_support.py"), "--quick", "--cpu"]
    command += ["--sections", "work", "head"]
    done = subprocess.run([*command, "--out", out, "--plot", picture], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = out.read_text().splitlines()
    assert "cores" in lines[0] and lines[2].startswith("Floor for")
    tables = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    by_ranks = [row for row in tables if row[4:5] == ["top_k 50 + top_p 0.9"]]
    assert len(by_ranks) == 2 and by_ranks[1][-1] == "344 (2)"  # 4 for the maximum, 8 + 4 + 82 x 4 for the rest
    assert all(float(time) > 0 for row in by_ranks for time in row[5].split(" + "))
    assert {row[0] for row in tables if len(row) == 9} >= {"fused head", "head, then ours"}
    assert "Left out: peer (no --peer was given)." in lines
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
