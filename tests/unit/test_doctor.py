"""What the doctor says of a machine that lacks something."""

import importlib.util
import io

import pytest
from rich.console import Console

from megatron_support import __main__ as command_line
from megatron_support.training import doctor
from megatron_support.training.doctor import Finding, print_findings


def test_a_required_package_that_is_missing_is_broken_with_its_remedy():
    (finding,) = doctor._required("no-such-package", "no_such_module")
    assert (finding.state, finding.remedy) == ("broken", "pip install no-such-package")


def test_an_optional_package_that_is_missing_names_purpose_and_remedy():
    finding = doctor._extra("gguf", "no-such-package", "no_such_module", "GGUF weights", "pip install it")
    assert (finding.state, finding.value, finding.remedy) == ("missing", "only for GGUF weights", "pip install it")


@pytest.mark.parametrize(
    ("installed", "gpus", "state", "remedy"),
    [
        (True, 1, "ok", ""),
        (False, 1, "missing", "megatron-support[te]"),
        (False, 0, "not used", "none needed on the CPU"),
        (True, 0, "not used", "pip uninstall transformer-engine"),
    ],
)
def test_transformer_engine_is_for_gpus_alone(installed, gpus, state, remedy, monkeypatch):
    spec = importlib.util.spec_from_loader("transformer_engine", loader=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if installed else None)
    finding = doctor._accelerators(gpus)[0]
    assert finding.item == "Transformer Engine"
    assert finding.state == state and remedy in finding.remedy


def test_no_remedy_is_cut_off_on_a_narrow_terminal():
    out = Console(file=io.StringIO(), width=80)
    print_findings([Finding(item="a", state="missing", value="x" * 50, remedy="z" * 60)], out)
    shown = out.file.getvalue()
    assert (shown.count("x"), shown.count("z")) == (50, 60)


def test_the_table_ends_with_whether_a_run_can_start(monkeypatch, capsys):
    out = Console(file=io.StringIO(), width=120)
    broken = [Finding(item="torch", state="broken", remedy="pip install torch")]
    print_findings(broken, out)
    assert out.file.getvalue().splitlines()[-1] == "a run cannot start: see torch"
    monkeypatch.setattr(doctor, "examine", lambda: broken)
    monkeypatch.setattr(command_line, "_be_quiet", lambda: None)
    assert command_line.main(["doctor"]) == 2
    assert "pip install torch" in capsys.readouterr().out
