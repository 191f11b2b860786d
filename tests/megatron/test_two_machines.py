"""scripts/train_multinode.sh on two machines of two ranks: what a run on one machine computes.

The machines are two network namespaces with a cable between them. Everything runs in a process namespace of its own, so
that nothing outlives its first process. Where the kernel does not let us make them, both nodes are on the loopback.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_support.__main__ import main
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TRAIN = ["configs/quickstart.yaml", "train.steps=2", "logging.progress=plain", "logging.tensorboard=false"]
OF_THE_MACHINE = ("seconds", "tokens_per_second", "memory")

NAMESPACES = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]

TWO_MACHINES = """
set -e
ip link set lo up
hostname machine0
unshare --net --uts bash -c '
  hostname machine1
  ip link set lo up
  until ip link show cable1 >/dev/null 2>&1; do sleep 0.05; done
  ip address add 10.77.0.2/24 dev cable1
  ip link set cable1 up
  NODE_RANK=1 GLOO_SOCKET_IFNAME=cable1 exec "$@"' machine1 "$@" &
machine1=$!
until [ "$(readlink /proc/$machine1/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link add name cable0 type veth peer name cable1 netns $machine1
ip address add 10.77.0.1/24 dev cable0
ip link set cable0 up
NODE_RANK=0 GLOO_SOCKET_IFNAME=cable0 "$@"
wait $machine1
"""

TWO_NODES = """
set -e
export GLOO_SOCKET_IFNAME=lo
NODE_RANK=1 "$@" &
other=$!
trap 'kill $other 2>/dev/null || true' EXIT
NODE_RANK=0 "$@"
wait $other
"""


@pytest.fixture(scope="module")
def refusal():
    """Why two namespaces cannot be made here, in the kernel's words; None where they can."""
    try:
        tried = subprocess.run(
            [*NAMESPACES, "bash", "-c", TWO_MACHINES, "both", "true"], capture_output=True, text=True, timeout=30
        )
    except OSError as error:
        return str(error)
    return tried.stderr.strip() if tried.returncode else None


def start(program: list[str], folder: Path, address: str) -> None:
    """Both nodes; whatever they started ends with ``program``."""
    variables = {
        "VENV": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port()),
        "MAX_RESTARTS": "0",
        "JOIN_TIMEOUT": "120",
    }
    command = [str(ROOT / "scripts/train_multinode.sh"), *TRAIN, f"logging.run_dir={folder}"]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        [*program, "both", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # --kill-child, or the trap, ends the rest
        raise
    assert process.returncode == 0, output


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def train_here(folder: Path) -> None:
    def one(rank, world):
        os.chdir(ROOT)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return main(["train", *TRAIN, f"logging.run_dir={folder}"])

    assert run_ranks(4, one, timeout=200) == [0] * 4


def run_of(folder: Path) -> tuple[list[dict], dict]:
    """Metrics without times and memory, and the environment."""
    (run,) = folder.iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in step.items() if not name.startswith(OF_THE_MACHINE)} for step in steps]
    return metrics, json.loads((run / "environment.json").read_text())


def expect_equal(folder: Path) -> dict:
    """The run of two nodes has the numbers of the one beside it; returns its environment."""
    metrics, environment = run_of(folder / "two")
    expected, _ = run_of(folder / "one")
    assert [step["step"] for step in expected] == [1, 2]
    assert len(expected[0]) > 30 and expected[0]["excluded_by_previous"] > 0 and expected[1]["grad_norm"] > 0
    assert len(metrics) == 2
    for found, step in zip(metrics, expected, strict=True):
        assert found == pytest.approx(step, rel=1e-6, abs=1e-9)
    assert environment["layout"] == {"tensor": 2, "pipeline": 1, "context": 1, "data": 2}
    return environment


def test_data_parallel_across_machines_and_tensor_parallel_inside(refusal, tmp_path):
    """TP 2 inside each machine, DP 2 over the cable."""
    if refusal is not None:
        pytest.skip(f"no network namespaces here ({refusal}); two nodes on the loopback stand in")
    start([*NAMESPACES, "bash", "-c", TWO_MACHINES], tmp_path / "two", "10.77.0.1")
    train_here(tmp_path / "one")
    environment = expect_equal(tmp_path)
    assert environment["machines"] == {"machine0": "0, 1", "machine1": "2, 3"}


def test_two_nodes_on_the_loopback(refusal, tmp_path, request):
    """What stands in for two machines."""
    if refusal is None and not request.config.getoption("--full"):
        pytest.skip("two network namespaces say more, and can be made here; --full runs both")
    start(["bash", "-c", TWO_NODES], tmp_path / "two", "127.0.0.1")
    train_here(tmp_path / "one")
    expect_equal(tmp_path)
