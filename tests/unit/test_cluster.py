"""The Slurm and Kubernetes jobs hand scripts/train_multinode.sh what it needs, as the page about them says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "examples/cluster/README.md").read_text()
VARIABLES = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "MAX_RESTARTS"}
STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
VARIABLES |= {STORE}

ECHO = """#!/usr/bin/env bash
printf "%s|" "$NODE_RANK" "$NNODES" "$MASTER_ADDR" "$MASTER_PORT" "$NPROC_PER_NODE" "$@"; echo
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path):
    """A repository with a stand-in for train_multinode.sh, and Slurm's two programs for a job of two nodes."""
    program(tmp_path / "scripts/train_multinode.sh", ECHO)
    hostnames = '[ "$3" = "node[3-4]" ] && printf "node3\\nnode4\\n"'
    program(tmp_path / "bin/scontrol", f"#!/usr/bin/env bash\n{hostnames}\n")
    tasks = 'for node in 0 1; do SLURM_NODEID=$node "$@" || exit 1; done'
    program(tmp_path / "bin/srun", f'#!/usr/bin/env bash\n[ "$1" = --kill-on-bad-exit=1 ] && shift\n{tasks}\n')
    shutil.copy(ROOT / "scripts/slurm.sbatch", tmp_path / "job")  # Slurm, too, runs a copy
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "41234",
        "SLURM_GPUS_ON_NODE": "4",
    }


def test_what_slurm_hands_over_starts_two_machines(slurm, tmp_path):
    """The real script in place of the stand-in."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", dirs_exist_ok=True)
    (tmp_path / "recipe.yaml").touch()
    done = submit({**slurm, "VENV": sys.prefix, "LOCAL_ADDR": "10.0.0.4"}, "--dry-run", "recipe.yaml", "name=x")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for line, is_host in ((first, "true"), (second, "false")):
        assert line.startswith(f"{STORE}=1 OMP_NUM_THREADS=")
        assert "--nnodes 2 --nproc-per-node 4 " in line and "--rdzv-endpoint node3:21234 " in line
        assert f"is_host={is_host}" in line and line.endswith("-m megatron_support train recipe.yaml name=x")


def submit(environment: dict, *arguments: str) -> subprocess.CompletedProcess:
    program = str(Path(environment["SLURM_SUBMIT_DIR"]) / "job")
    return subprocess.run(["bash", program, *arguments], env=environment, capture_output=True, text=True, timeout=30)


def test_slurm_starts_each_node_with_its_rank(slurm):
    done = submit(slurm, "configs/my recipe.yaml", "name=a b")
    assert done.returncode == 0, done.stderr
    expected = "2|node3|21234|4|configs/my recipe.yaml|name=a b|"
    assert done.stdout.splitlines() == [f"0|{expected}", f"1|{expected}"]


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("", "1"), ("0", "0")])
def test_restarted_ranks_get_a_store_of_their_own(slurm, tmp_path, given, seen):
    """Through Slurm's job, and by the script alone, which hands it to torchrun."""
    environment = {name: value for name, value in slurm.items() if name != STORE}
    environment |= {} if given is None else {STORE: given}
    program(tmp_path / "scripts/train_multinode.sh", f'#!/usr/bin/env bash\necho "${STORE}"\n')
    assert submit(environment, "r.yaml").stdout.splitlines() == [seen, seen]
    (tmp_path / "recipe.yaml").touch()
    program(tmp_path / "venv/bin/python", f'#!/usr/bin/env bash\n[ "$1" = -m ] || exit 0\nprintenv {STORE}\n')
    alone = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node3", "NPROC_PER_NODE": "1", "LOCAL_ADDR": "node4"}
    done = subprocess.run(
        [str(ROOT / "scripts/train_multinode.sh"), "recipe.yaml"],
        cwd=tmp_path,
        env={**environment, **alone, "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == f"{seen}\n", done.stderr


def test_slurm_refuses_what_cannot_run(slurm, tmp_path):
    assert submit(slurm).returncode == 2 and "usage: sbatch" in submit(slurm).stderr
    outside = {name: value for name, value in slurm.items() if name != "SLURM_JOB_NODELIST"}
    assert "submit this file with sbatch" in submit(outside, "r.yaml").stderr
    elsewhere = submit({**slurm, "REPOSITORY": str(tmp_path / "bin")}, "r.yaml")
    assert elsewhere.returncode == 2 and "submit from the repository or set REPOSITORY" in elsewhere.stderr


def test_kubernetes_has_the_same_environment():
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(values["NNODES"])
    assert values["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == values["NPROC_PER_NODE"]
    assert 'NODE_RANK="$JOB_COMPLETION_INDEX"' in container["args"][0]
    assert set(values) | {"NODE_RANK"} >= VARIABLES
    (recipe,) = re.findall(r"configs/\w+\.yaml", container["args"][0])
    assert (ROOT / recipe).is_file()
    command = container["args"][0].replace("train_multinode.sh", "train_multinode.sh --dry-run")
    pod_environment = {**os.environ, **values, "JOB_COMPLETION_INDEX": "0", "VENV": sys.prefix}
    done = subprocess.run(
        [*container["command"], command], cwd=ROOT, env=pod_environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert values[STORE] == "1" and done.stdout.startswith(f"{STORE}=1 ")
    assert "--max-restarts 3" in done.stdout and f"--rdzv-endpoint {values['MASTER_ADDR']}:29500" in done.stdout
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_page_names_every_variable_and_files_that_exist():
    assert {name for name in VARIABLES if f"| `{name}` |" in PAGE} == VARIABLES
    for path in re.findall(r"(?:scripts|configs|examples)/[\w./]+\.(?:sbatch|yaml)", PAGE):
        assert (ROOT / path).is_file(), path
