"""What a run measures of itself: operations worked out by hand, known devices, trackers that may be missing."""

import sys
import types

import pytest
import torch

from megatron_support.config.recipe import ActorStepConfig, Architecture, ModelConfig, ProfileConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.communication import CommunicationClock
from megatron_support.training import tracking
from megatron_support.training.flops import forward_flops, peak_flops, step_flops
from megatron_support.training.folder import RunFolder
from megatron_support.training.tracking import check_wandb
from megatron_support.training.watch import Profiler, peak_memory
from tests.unit.test_run_folder import batch, recipe

ARCHITECTURE = Architecture(
    vocab_size=10, num_layers=2, hidden_size=4, num_attention_heads=2, num_query_groups=1, ffn_hidden_size=3
)


def test_operations_of_a_forward_pass_by_hand():
    # a layer: queries and output 2 x 4 x 4, keys and values 2 x 4 x 2, feed-forward 3 x 4 x 3: 84 weights
    # 12 tokens, 9 of them response tokens (rows of 4): 2 x (2 x 84 x 12 + 4 x 10 x 9); attention 2 x 2 x 4 x (3 x 16)
    assert forward_flops(ARCHITECTURE, batch()) == 2 * (2 * 84 * 12 + 4 * 10 * 9) + 768
    whole = forward_flops(ARCHITECTURE, batch(), response_only=False)
    assert whole - forward_flops(ARCHITECTURE, batch()) == 2 * 4 * 10 * 3


def test_a_step_is_its_passes():
    step = ActorStepConfig.from_dict({"microbatch": {"max_tokens": 64}, "epochs": 2, "loss": {"kl": {"coef": 0.1}}})
    one = forward_flops(ARCHITECTURE, batch())
    assert step_flops(ARCHITECTURE, batch(), step, teacher=False) == (1 + 1 + 2 * 3) * one
    on_policy = ActorStepConfig.from_dict(
        {"microbatch": {"max_tokens": 64}, "loss": {"surrogate": {"type": "on_policy"}}}
    )
    assert step_flops(ARCHITECTURE, batch(), on_policy, teacher=True) == (1 + 3) * one


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A10", 125),
        ("AMD EPYC", None),
    ],
)
def test_peaks_of_devices(name, tflops):
    model = ModelConfig(architecture=ARCHITECTURE)
    assert peak_flops(name, model, None) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(name, model, 5.0) == 5e12
    assert peak_flops(name, ModelConfig(architecture=ARCHITECTURE, dtype="float32"), None) is None


def test_a_process_has_a_peak_of_memory():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert peak_memory(torch.device("cpu")) >= before > 2**20 and held.numel() == 2**26


def test_megatrons_communication_timers_are_counted_and_others_are_not():
    clock = CommunicationClock(torch.device("cpu"))
    for name in ("forward-recv", "all-grads-sync", "params-all-gather", "forward-backward", "optimizer-inner-step"):
        clock(name, log_level=1).start(barrier=True)
        sum(range(20_000))
        clock(name).stop()
    assert [name for name, watch in clock._watches.items() if watch.take() > 0] == [
        "forward-recv",
        "all-grads-sync",
        "params-all-gather",
    ]
    assert clock.take() == 0, "taken"


def test_on_an_accelerator_times_are_those_of_events(monkeypatch):
    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.clock += 500
            self.at = Event.clock

        def synchronize(self): ...

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(Event=Event))
    clock = CommunicationClock(torch.device("meta"))
    for _ in range(3):
        clock("forward-send", log_level=2).start()
        clock("forward-send").stop()
    assert clock.take() == 1.5, "milliseconds become seconds"


def test_a_profile_covers_its_steps_and_names_phases(tmp_path):
    profiler = Profiler(ProfileConfig(start=2, stop=3))
    for step in (1, 2, 3, 4):
        profiler.before(step)
        with torch.profiler.record_function(f"megatron_support/phase-of-{step}"):
            torch.ones(3).sum()
        profiler.after(step, tmp_path)
    (trace,) = (tmp_path / "profile").iterdir()
    import gzip

    text = gzip.decompress(trace.read_bytes()).decode()
    assert trace.name == "steps_2_3.json.gz"
    assert [f"phase-of-{step}" in text for step in (1, 2, 3, 4)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("profile", "message"),
    [({"start": 3, "stop": 2}, r"stop must be >= start \(3\)"), ({"start": 1, "stop": 9}, r"profile\.stop must be <=")],
)
def test_a_profile_lies_within_the_run(profile, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        recipe(tmp_path, train={"steps": 8, "microbatch": {"max_tokens": 64}, "profile": profile})


WANDB = {"project": "actors", "tags": ["gspo"], "mode": "offline"}


def test_a_missing_wandb_is_found_before_anything_is_built(tmp_path, monkeypatch):
    wanted = recipe(tmp_path, logging={"wandb": WANDB, "run_dir": str(tmp_path)})
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"without the package wandb.*pip install 'megatron-support\[wandb\]'"):
        check_wandb(wanted)
    check_wandb(recipe(tmp_path))


def test_wandb_gets_recipe_and_metrics(tmp_path, monkeypatch):
    """A stand-in for the package, with the functions of its public interface that a run calls."""
    calls: list = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folder = RunFolder(
        recipe(tmp_path, logging={"wandb": WANDB, "run_dir": str(tmp_path / "runs"), "tensorboard": False})
    )
    folder.write_step(1, {"loss": 0.5})
    folder.close()
    options, step, finished = calls
    assert (options["project"], options["tags"], options["mode"]) == ("actors", ["gspo"], "offline")
    assert options["name"] == folder.path.name and options["config"]["optimizer"]["lr"] == 0.1
    assert (step, finished) == ((1, {"loss": 0.5}), "finished")
