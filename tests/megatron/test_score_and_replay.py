"""``score`` writes a model's log-probabilities into a rollout file; ``replay`` recomputes a step's loss from one."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from megatron_support.__main__ import main
from megatron_support.commands.score import _ROLES
from megatron_support.config import load_recipe
from megatron_support.config.replay import ReplayConfig
from megatron_support.rollouts import files
from megatron_support.rollouts.files import read_rollouts, write_rollouts
from megatron_support.training.replay import changed_tokens, replay, worst_tokens
from megatron_support.training.scoring import ROLES
from tests import no_files
from tests.command_line import command
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
ROLLOUTS = ROOT / "examples" / "data" / "swap_values.jsonl"
FROM_FILE = [f"rollouts={{type: files, paths: [{ROLLOUTS}], sequences_per_step: 32}}", "train.steps=1"]


def run(world: int, folder: Path, *arguments: str) -> str:
    """What the first rank prints; the command must succeed."""
    results = run_ranks(world, command, folder, list(map(str, arguments)), timeout=120)
    assert [code for code, _, _ in results] == [0] * world, results
    return results[0][1]


def train(folder: Path, *overrides: str) -> tuple[Path, dict[str, float]]:
    """The run folder of a short run on two ranks, and the last step's metrics."""
    run(2, folder, "train", QUICKSTART, "logging.run_dir=runs", "train.steps=2", *overrides)
    (made,) = (folder / "runs").iterdir()
    return made, json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.minibatches=2"],
        ["loss.ratio_level=sequence", "loss.entropy_coef=0.01", "loss.aggregation={type: sequence_mean}"],
        ["loss.normalization=survivors", "loss.correction={type: tis, high: 2.0}", "loss.surrogate={type: cispo}"],
    ],
    ids=["PPO and KL, two minibatches", "GSPO and entropy", "CISPO, correction, survivors"],
)
def test_a_replay_of_a_run_reports_what_its_last_step_reported(overrides, tmp_path):
    folder, reported = train(tmp_path, *overrides)
    recipe = load_recipe(folder / "recipe.yaml")
    config = ReplayConfig(loss=recipe.loss, advantages=recipe.advantages, minibatches=recipe.train.minibatches)
    found = replay(config, read_rollouts(folder / "rollouts_last_step.jsonl"))
    assert found.metrics["policy_support_excluded_tokens"] > 0
    compared = {name: found.metrics[name] for name in found.metrics if name in reported} | {"loss": found.loss}
    assert len(compared) > 20
    assert compared == pytest.approx({name: reported[name] for name in compared}, rel=2e-5, abs=2e-7)
    assert bool((found.gradient[found.view.excluded] == 0).all()), "an excluded token has no gradient"
    assert bool((found.gradient[~found.rollouts.response_mask] == 0).all())
    printed = run(1, tmp_path, "replay", folder.parent)  # a folder of runs: the newest
    assert f"{found.loss:.6g}" in printed and "Worst token of 8 samples, by ratio" in printed


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """The example's rollouts with current and previous log-probabilities of two models, and advantages by hand."""
    folder = tmp_path_factory.mktemp("scored")
    recipe = [QUICKSTART, "parallel.tensor=1"]
    run(1, folder, "score", ROLLOUTS, *recipe, "--output", "prev.jsonl")
    run(1, folder, "score", "prev.jsonl", *recipe, "seed=7", "--role", "current", "--output", "all.jsonl")
    return folder / "all.jsonl"


def test_scores_are_the_same_in_every_layout_and_those_that_a_step_trains_on(scored, tmp_path):
    one = read_rollouts(scored)
    assert int((one.prev_logprobs == -torch.inf).sum()) == 11 and one.curr_logprobs is not None
    printed = run(2, tmp_path, "score", ROLLOUTS, QUICKSTART, "--output", "two.parquet")
    assert "outside the support: 11" in printed and "written to two.parquet: prev_logprobs, prev_log" in printed
    two = read_rollouts(tmp_path / "two.parquet")
    made, _ = train(tmp_path, *FROM_FILE, "train.minibatches=1")
    stepped = read_rollouts(made / "rollouts_last_step.jsonl")
    for other in (two, stepped):
        for name in ("prev_logprobs", "prev_logprobs_unfiltered"):
            torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=3e-6)
    assert two.sample_ids == one.sample_ids and torch.equal(two.tokens, one.tokens)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_reference_and_teacher_have_no_filter_and_their_own_weights(role, scored, tmp_path):
    given = [QUICKSTART, "parallel.tensor=1"]
    run(1, tmp_path, "score", scored, *given, "--role", role, "--output", "own.jsonl")
    same, found = read_rollouts(tmp_path / "own.jsonl"), f"{role}_logprobs"
    assert torch.equal(getattr(same, found), same.prev_logprobs_unfiltered)
    run(2, tmp_path, "train", QUICKSTART, "train.steps=1", "train.save_final=true", "logging.run_dir=runs")
    checkpoint = next((tmp_path / "runs").glob("*/checkpoint*"))
    with_checkpoint = [f"{role}.checkpoint={{type: megatron, path: {checkpoint}}}"]
    with_checkpoint += ["advantages={type: opd}"] if role == "teacher" else []
    run(1, tmp_path, "score", scored, *given, *with_checkpoint, "--role", role, "--output", "other.jsonl")
    other = getattr(read_rollouts(tmp_path / "other.jsonl"), found)
    assert not torch.equal(other, getattr(same, found)) and bool(torch.isfinite(other).all())


def test_the_command_offers_every_role():
    assert tuple(ROLES) == _ROLES


REFUSED = {
    "no folder": (
        ["--output", "gone/out.jsonl"],
        "--output must be a file in a folder that can be written, got gone/out",
    ),
    "another ending": (["--output", "out.csv"], "--output must end in .jsonl or .parquet, got out.csv"),
    "too long": (["--output", "out.jsonl", "train.microbatch.max_tokens=3"], "max_tokens=3"),
    "vocabulary": (["--output", "out.jsonl", "model.architecture.vocab_size=64"], "must be in the vocabulary [0, 64)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_score_refuses_before_it_writes(case, tmp_path):
    arguments, message = REFUSED[case]
    results = run_ranks(2, command, tmp_path, ["score", str(ROLLOUTS), str(QUICKSTART), *arguments], timeout=60)
    assert [code for code, _, _ in results] == [2, 2]
    assert [message in err for _, _, err in results].count(True) == 1, results
    assert list(tmp_path.iterdir()) == []


def test_a_score_goes_to_a_file_and_nowhere_else(tmp_path):
    def on_rank(rank, world):
        for kind in no_files.KINDS:
            arguments = ["score", str(ROLLOUTS), str(QUICKSTART), "parallel={}", "--output", "out.jsonl"]
            with no_files.standing(tmp_path / "out.jsonl", kind):
                code, _, shown = command(rank, world, tmp_path, arguments)
            assert code == 2 and "got out.jsonl (what is there is no regular file); choose another" in shown

    run_ranks(1, on_rank, timeout=60)


def test_a_file_can_be_scored_in_place_and_stays_whole_when_writing_fails(tmp_path, monkeypatch):
    file = tmp_path / "rollouts.jsonl"
    file.write_bytes(ROLLOUTS.read_bytes())

    def broken(rank, world):
        def full_disk(rollouts):
            yield {"id": "the first row"}
            raise OSError(28, "No space left on device")

        files._plain_rows = full_disk  # in this forked rank alone
        return command(rank, world, tmp_path, ["score", str(file), str(QUICKSTART), "--output", str(file)])

    results = run_ranks(2, broken, timeout=60)
    assert [code for code, _, _ in results] == [2, 2] and "No space left" in "".join(err for _, _, err in results)
    assert file.read_bytes() == ROLLOUTS.read_bytes() and list(tmp_path.iterdir()) == [file]
    run(2, tmp_path, "score", file, QUICKSTART, "--output", file)
    assert read_rollouts(file).prev_logprobs is not None


def test_the_gradient_is_the_slope_of_the_loss(scored):
    rollouts = read_rollouts(scored)
    config = ReplayConfig.from_dict({"advantages": {"type": "grpo"}, "loss": {"surrogate": {"type": "reinforce"}}})
    found = replay(config, rollouts)
    token = int(found.gradient.abs().argmax())
    moved = []
    for shift in (-1e-2, 1e-2):
        current = rollouts.curr_logprobs.clone()
        current[token] += shift
        moved.append(replay(config, rollouts.with_columns(curr_logprobs=current)).loss)
    assert (moved[1] - moved[0]) / 2e-2 == pytest.approx(float(found.gradient[token]), rel=1e-2)


def test_a_masked_sample_enters_no_loss(scored):
    rollouts = read_rollouts(scored)
    columns = {"advantages": torch.ones(rollouts.tokens.numel())}
    kept = torch.arange(rollouts.num_sequences) > 0
    config = ReplayConfig.from_dict({"loss": {"surrogate": {"type": "reinforce"}}})
    rollouts = rollouts.with_columns(**columns)
    masked = replay(config, rollouts.with_columns(sample_mask=kept))
    assert masked.loss == pytest.approx(replay(config, rollouts.select(kept.nonzero().flatten())).loss, rel=1e-6)
    assert not masked.gradient[: int(rollouts.lengths[0])].any() and bool(masked.gradient.any())


def test_worst_tokens_are_one_a_sample_and_changes_are_sorted(scored):
    rollouts = read_rollouts(scored)
    narrow, wide = (
        replay(
            ReplayConfig.from_dict(
                {
                    "advantages": {"type": "grpo"},
                    "loss": {"surrogate": {"type": "ppo_clip", "clip_low": c, "clip_high": c}},
                }
            ),
            rollouts,
        )
        for c in (0.01, 0.9)
    )
    rows = worst_tokens(narrow, samples=5)
    assert len({row.sample for row in rows}) == len(rows) == 5
    sizes = [abs(torch.tensor(row.ratio).log()) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert float(max(sizes)) == pytest.approx(float(narrow.view.log_ratio.abs().max()), rel=1e-5)
    pairs = changed_tokens(narrow, wide, samples=1000)
    changes = [abs(a.gradient - b.gradient) for a, b in pairs]
    assert changes == sorted(changes, reverse=True) and min(changes) > 0
    assert changed_tokens(narrow, narrow, samples=5) == []


def test_compare_prints_both_and_the_difference(scored, tmp_path):
    base = ["replay", scored, "--recipe", QUICKSTART, "loss.kl=null", "loss.surrogate.clip_low=0.01"]
    printed = run(1, tmp_path, *base, "--compare", "loss.surrogate.clip_low=0.9")
    assert f"A: {QUICKSTART} loss.kl=null" in printed and "loss.surrogate.clip_low=0.9" in printed
    assert "gradient B" in printed
    line = next(line for line in printed.splitlines() if line.strip().startswith("clip_fraction_low"))
    _, a, b, difference = line.split()
    assert float(b) < float(a) and float(difference) == pytest.approx(float(b) - float(a), rel=1e-3)
    assert "=" in next(line for line in printed.splitlines() if "excluded_by_previous" in line)
    recipe = tmp_path / "other.yaml"
    recipe.write_text(
        yaml.safe_dump({"defaults": [str(QUICKSTART)], "may_read": [str(QUICKSTART.parent)], "loss": {"kl": None}})
    )
    printed = run(1, tmp_path, *base, "--compare", recipe)
    assert f"B: {recipe}" in printed


BAD_REPLAYS = {
    "no current": ([str(ROLLOUTS)], "a replay needs the column curr_logprobs, got none"),
    "no advantages": (["SCORED"], "advantages must be in the file or be computed"),
    "unknown field": (["SCORED", "loss.surrogat=1"], "surrogat: unknown field; did you mean 'surrogate'?"),
    "two recipes": (["SCORED", "--compare", "a.yaml", "b.yaml"], "--compare takes one recipe"),
    "no KL columns": (
        ["SCORED", "advantages={type: grpo}", "loss.kl={coef: 0.1}"],
        "reference_logprobs is read by the KL term",
    ),
}


@pytest.mark.parametrize("case", BAD_REPLAYS)
def test_replay_says_what_is_missing(case, scored, tmp_path, capsys):
    arguments, message = BAD_REPLAYS[case]
    assert main(["replay", *(str(scored) if part == "SCORED" else part for part in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_fault_is_named(scored, tmp_path, capsys):
    rollouts = read_rollouts(scored)
    token = int(rollouts.response_mask.nonzero()[3])
    current = torch.full_like(rollouts.curr_logprobs, -1.0)
    current[token] = -torch.inf
    changed = rollouts.with_columns(curr_logprobs=current, prev_logprobs=current + 0.1).without_filters()
    write_rollouts(tmp_path / "r.jsonl", changed)
    assert main(["replay", str(tmp_path / "r.jsonl"), "advantages={type: grpo}"]) == 2
    message = capsys.readouterr().err
    sequence = int(rollouts.sequence_ids[token])
    place = f"sample {rollouts.sample_ids[sequence]!r}, token {token - int(rollouts.cu_seqlens[sequence])} is -inf"
    assert f"curr_logprobs of {place}" in message
