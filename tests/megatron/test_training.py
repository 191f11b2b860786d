"""The loop from recipe to run folder: the quickstart's first steps, files, the summary, the weights it leaves."""

import io
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from megatron_support.config import load_recipe
from megatron_support.rollouts.files import read_rollouts, write_rollouts
from megatron_support.training.run import train
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def run(rank, world, path, folder, overrides=()):
    """(what was printed, rewards, exclusions by source, folder) of a run on this rank."""
    out = io.StringIO()
    recipe = load_recipe(path, [f"logging.run_dir={folder}", *overrides])
    summary = train(recipe, Console(file=out, width=120))
    return out.getvalue(), summary.rewards, summary.exclusions.sources(), str(summary.folder)


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The first two steps as shipped: two ranks, tensor parallel."""
    return run_ranks(2, run, QUICKSTART, tmp_path_factory.mktemp("runs"), ["train.steps=2"])


def test_the_quickstart_prints_from_one_rank_and_ends_with_the_reward(quickstart):
    (text, rewards, _, folder), (silent, *_) = quickstart
    assert silent == ""
    lines = text.splitlines()
    assert lines[0].startswith("quickstart: 2 layers of 64, float32; 2 CPU ranks (tensor 2); 2 steps of 256 sequences")
    assert " ".join(lines[1].split()) == "step reward loss excluded KL grad norm tokens/s time left"
    assert [line.split()[0] for line in lines[2:4]] == ["1/2", "2/2"]
    assert lines[-1] == f"reward {rewards[0]:.3f} -> {rewards[1]:.3f}"
    assert folder in lines[-2]


def test_every_rank_has_the_same_result(quickstart):
    assert quickstart[0][1:] == quickstart[1][1:]


def test_the_run_folder_has_what_the_summary_names(quickstart):
    _, rewards, sources, folder = quickstart[0]
    names = {path.name for path in Path(folder).iterdir()}
    written = {"recipe.yaml", "metrics.jsonl", "tensorboard", "summary.json", "rollouts_last_step.jsonl"}
    assert names == written | {"environment.json", "tokens.jsonl", "token_text.json"}
    first, second = metrics(folder)
    assert [first["reward"], second["reward"]] == rewards
    excluded = sum(step["policy_support_excluded_tokens"] for step in (first, second))
    assert excluded == sum(sources.values()) > 0, "a bf16 sampler and an fp32 trainer disagree near the boundary"
    # the reference is the policy at the start: its KL is 0 in the first minibatch and positive later
    assert 0 < first["kl_penalty"] < second["kl_penalty"]
    summary = json.loads((Path(folder) / "summary.json").read_text())
    assert summary["excluded_tokens"]["total"] == excluded
    assert summary["reward"] == {"first": rewards[0], "last": rewards[1], "steps_averaged": 1}
    assert load_recipe(Path(folder) / "recipe.yaml").train.steps == 2


def test_the_excluded_tokens_of_each_step_are_those_that_the_loss_counted(quickstart):
    folder = Path(quickstart[0][3])
    records = [json.loads(line) for line in (folder / "tokens.jsonl").read_text().splitlines()]
    for values, record in zip(metrics(folder), records, strict=True):
        by_source = {source: sum(signs.values()) for source, signs in record["excluded"].items()}
        assert sum(by_source.values()) == values["policy_support_excluded_tokens"] > 0
        assert by_source["previous"] == values["excluded_by_previous"]
        assert sum(record["positions"]["excluded"]) == sum(by_source.values())
        quantiles = record["ratio"]["quantiles"]
        assert quantiles[0] == pytest.approx(values["probs_ratio_min"], abs=1e-5)
        assert quantiles[-1] == pytest.approx(values["probs_ratio_max"], abs=1e-5)
    text = json.loads((folder / "token_text.json").read_text())
    assert text["97"] == "a" and text["258"] == "<eos>" and "195" not in text, "a byte of a longer character"


def test_a_step_measures_time_memory_and_utilisation(tmp_path):
    """On two pipeline stages, which wait for each other; the profile is of the first rank."""
    overrides = ["train.steps=2", "parallel={pipeline: 2}", "rollouts.prompts_per_step=8", "logging.tensorboard=false"]
    overrides += ["logging.peak_tflops=0.001", "train.profile={start: 2, stop: 2}"]
    folder = Path(run_ranks(2, run, QUICKSTART, tmp_path, overrides)[0][3])
    for values in metrics(folder):
        phases = [values[f"seconds/{name}"] for name in ("rollouts", "previous", "reference", "update")]
        assert all(seconds > 0 for seconds in phases) and sum(phases) <= values["seconds"] * 1.001
        assert 0 < values["seconds/communication"] < values["seconds"]
        assert values["memory_gib"] > 0.05 and values["mfu"] > 0
    assert [path.name for path in (folder / "profile").iterdir()] == ["steps_2_2.json.gz"]


def test_the_last_rollouts_are_those_that_were_trained_on(quickstart):
    folder = Path(quickstart[0][3])
    rollouts = read_rollouts(folder / "rollouts_last_step.jsonl", vocab_size=259)
    assert rollouts.num_sequences == 256
    assert rollouts.rewards.mean().item() == pytest.approx(quickstart[0][1][1], abs=1e-6)
    generation = rollouts.generation_logprobs[rollouts.response_mask]
    assert bool((generation < 0).all()) and bool(torch.isfinite(generation).all())


# the sampler's copy in fp32, so that layouts differ by rounding alone
SAME = ["train.steps=2", "rollouts.weights_dtype=float32", "rollouts.prompts_per_step=16", "logging.tensorboard=false"]


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, []),
        (2, ["parallel.tensor=1", "parallel.pipeline=2"]),
        (2, ["parallel.tensor=1", "train.microbatch.layout=packed", "train.microbatch.max_tokens=64"]),
        (2, ["parallel.tensor=1", "parallel.context=2"]),
        (2, ["parallel.sequence=true", "optimizer.distributed=true"]),
    ],
    ids=["TP", "PP", "DP packed", "CP", "SP"],
)
def test_two_ranks_train_as_one_does(world, overrides, tmp_path):
    alone = run_ranks(1, run, QUICKSTART, tmp_path / "1", [*SAME, "parallel.tensor=1"])[0]
    together = run_ranks(world, run, QUICKSTART, tmp_path / "2", [*SAME, *overrides])[0]
    assert together[1] == alone[1], "rewards: the same tokens were sampled in both steps"
    assert max(step["grad_norm"] for step in metrics(alone[3])) > 0.1, "something is learned"
    for one, two in zip(metrics(alone[3]), metrics(together[3]), strict=True):
        for name in ("loss", "kl_penalty", "grad_norm", "policy_support_excluded_tokens", "token_mult_prob_error"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


def test_a_replayed_support_excludes_nothing(tmp_path):
    """The trainer renormalises over the sampler's own sets: every sampled token is inside."""
    overrides = ["train.steps=2", "logprobs.support=replay", "rollouts.prompts_per_step=8"]
    _, _, sources, folder = run_ranks(2, run, QUICKSTART, tmp_path, overrides)[0]
    assert sources == {"previous": 0, "generation": 0, "current": 0}
    assert read_rollouts(Path(folder) / "rollouts_last_step.jsonl").support is not None


def test_the_reward_rises(tmp_path):
    overrides = ["train.steps=20", "parallel.tensor=1", "logging.tensorboard=false"]
    _, rewards, _, _ = run_ranks(1, run, QUICKSTART, tmp_path, overrides)[0]
    assert sum(rewards[:4]) / 4 < 0.1
    assert sum(rewards[-4:]) / 4 > 0.2


def file_recipe(tmp_path, rollouts: Path, **train) -> Path:
    tree = yaml.safe_load(QUICKSTART.read_text())
    tree["rollouts"] = {"type": "files", "paths": [os.path.relpath(rollouts, tmp_path)], "sequences_per_step": 3}
    tree["train"] |= {"minibatches": 1, **train}
    tree["loss"].pop("kl")
    path = tmp_path / "files.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_files_are_read_in_order_and_from_the_start_again(quickstart, tmp_path):
    recorded = read_rollouts(Path(quickstart[0][3]) / "rollouts_last_step.jsonl").select(torch.arange(4))
    recorded = recorded.with_columns(rewards=torch.tensor([0.0, 0.25, 0.5, 1.0]))
    write_rollouts(tmp_path / "four.jsonl", recorded)
    recipe = file_recipe(tmp_path, tmp_path / "four.jsonl", steps=3)
    (text, rewards, _, _), _ = run_ranks(2, run, recipe, tmp_path / "runs")
    # rows 0 1 2, then 3 0 1, then 2 3 0
    assert rewards == pytest.approx([0.75 / 3, 1.25 / 3, 1.5 / 3])
    assert text.splitlines()[-1] == "reward 0.250 -> 0.500"


def test_final_weights_can_be_loaded_into_another_layout(tmp_path):
    overrides = ["train.steps=1", "train.minibatches=1", "rollouts.prompts_per_step=16", "logging.tensorboard=false"]
    overrides += ["rollouts.weights_dtype=float32"]
    _, _, _, first = run_ranks(2, run, QUICKSTART, tmp_path, [*overrides, "train.save_final=true"])[0]
    trained = f"model.weights={{type: megatron, path: {first}/checkpoint}}"
    random = "reference.checkpoint={type: random}"  # of the recipe's seed: where the first run began
    two = run_ranks(2, run, QUICKSTART, tmp_path, [*overrides, trained, random])[0]
    one = run_ranks(1, run, QUICKSTART, tmp_path, [*overrides, trained, random, "parallel.tensor=1"])[0]
    divergence = metrics(two[3])[0]["kl_penalty"]
    assert divergence > 1e-4, "the weights have moved away from the start"
    assert metrics(one[3])[0]["kl_penalty"] == pytest.approx(divergence, rel=1e-3)
    assert one[1] == two[1]


def test_a_reference_of_its_own_gives_a_divergence_from_the_first_step(tmp_path):
    overrides = ["train.steps=1", "train.minibatches=1", "rollouts.prompts_per_step=16", "logging.tensorboard=false"]
    _, _, _, same = run_ranks(2, run, QUICKSTART, tmp_path, [*overrides, "train.save_final=true"])[0]
    assert metrics(same)[0]["kl_penalty"] == pytest.approx(0, abs=1e-9), "the policy is still its own reference"
    reference = f"reference.checkpoint={{type: megatron, path: {same}/checkpoint}}"
    _, _, _, other = run_ranks(2, run, QUICKSTART, tmp_path, [*overrides, reference])[0]
    assert metrics(other)[0]["kl_penalty"] > 1e-4
