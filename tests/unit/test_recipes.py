"""Shipped recipes, what they inherit, and the reference that is generated from the schema."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_support.__main__ import main
from megatron_support.config import load_recipe
from megatron_support.config.reference import json_schema, markdown
from megatron_support.errors import ConfigurationError
from tests.unit.test_config import BASE, changed

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def write(path: Path, tree) -> Path:
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_the_table_names_every_recipe():
    table = (CONFIGS / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\]\(\1\.yaml\)", table, re.M)) == NAMES


def test_the_reference_is_up_to_date():
    assert (CONFIGS / "REFERENCE.md").read_text() == markdown(), (
        "run: megatron-support recipe --reference > configs/REFERENCE.md"
    )


def test_the_reference_has_types_bounds_defaults_and_descriptions():
    text = markdown()
    assert "| `lr` | number, > 0 | required |" in text
    assert '| `type` | `k1` or `k2` or `k3` or `abs` | `"k3"` |' in text
    assert "## `loss.surrogate` of type `sapo`" in text and "## `rollouts.sampling`" in text
    assert "Global gradient norm; 0 for no clipping." in text


def test_the_command_prints_both(capsys):
    assert main(["recipe", "--reference"]) == 0
    assert capsys.readouterr().out == markdown()
    assert main(["recipe", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json_schema())
    assert schema["additionalProperties"] is False and "defaults" in schema["properties"]
    assert schema["$defs"]["OptimizerSettings"]["properties"]["lr"] == {
        "exclusiveMinimum": 0,
        "title": "Lr",
        "type": "number",
    }


# what makes a recipe what its name says, beyond the quickstart it inherits from
ESSENCE = {
    "grpo": lambda r: (r.advantages.type, r.loss.aggregation.type, r.loss.kl.type) == ("grpo", "sequence_mean", "k3"),
    "dapo": lambda r: r.loss.kl is None and r.loss.surrogate.clip_high > r.loss.surrogate.clip_low,
    "gspo": lambda r: r.loss.ratio_level == "sequence",
    "cispo": lambda r: (r.loss.surrogate.type, r.loss.correction.type) == ("cispo", "tis"),
    "reinforce_pp": lambda r: r.advantages.kl_in_reward.coef == 0.001 and r.loss.kl is None,
    "opd": lambda r: r.advantages.type == "opd" and r.teacher.checkpoint.type == "megatron",
    "ppo_gae": lambda r: r.advantages.type == "gae" and r.rollouts.type == "files",
    "replay": lambda r: r.logprobs.support == "replay",
    "smollm2_sampler": lambda r: r.rollouts.type == "sampler" and r.model.weights.type == "gguf",
    "dense_8b": lambda r: (r.parallel.tensor, r.parallel.pipeline, r.parallel.context) == (4, 2, 2),
    "moe_30b_a3b": lambda r: (
        (r.parallel.tensor, r.parallel.pipeline, r.parallel.context, r.parallel.expert) == (2, 2, 2, 8)
    ),
}


@pytest.mark.parametrize("name", ESSENCE)
def test_a_recipe_is_what_it_says(name):
    assert ESSENCE[name](load_recipe(CONFIGS / f"{name}.yaml"))


def test_later_files_win_and_the_recipe_over_all(tmp_path):
    write(tmp_path / "one.yaml", changed({"seed": 1, "optimizer.eps": 1e-6, "train.epochs": 2}))
    write(tmp_path / "two.yaml", {"seed": 2, "optimizer": {"lr": 0.5}, "train": {"steps": 3}})
    recipe = write(tmp_path / "r.yaml", {"defaults": ["one.yaml", "two.yaml"], "train": {"epochs": 4}})
    loaded = load_recipe(recipe, ["optimizer.beta1=0.5"])
    assert (loaded.seed, loaded.train.steps, loaded.train.epochs) == (2, 3, 4)
    assert (loaded.optimizer.lr, loaded.optimizer.eps, loaded.optimizer.beta1) == (0.5, 1e-6, 0.5)


def test_another_type_replaces_what_was_inherited(tmp_path):
    write(tmp_path / "base.yaml", changed({"loss.surrogate": {"type": "ppo_clip", "dual_clip": 3.0}}))
    tree = {"defaults": ["base.yaml"], "loss": {"surrogate": {"type": "sapo"}}}
    assert load_recipe(write(tmp_path / "r.yaml", tree)).loss.surrogate.tau_negative == 1.05
    tree["loss"]["surrogate"] = {"clip_high": 0.3}
    surrogate = load_recipe(write(tmp_path / "r.yaml", tree)).loss.surrogate
    assert (surrogate.dual_clip, surrogate.clip_high) == (3.0, 0.3), "the same type is merged"


def test_null_takes_an_inherited_mapping_away(tmp_path):
    write(tmp_path / "base.yaml", changed({"loss.kl": {"coef": 0.1}}))
    assert load_recipe(write(tmp_path / "r.yaml", "defaults: [base.yaml]\nloss: {kl: null}")).loss.kl is None


def test_a_bare_off_is_the_word(tmp_path):
    recipe = write(tmp_path / "r.yaml", yaml.safe_dump(BASE) + "logging: {progress: off}\n")
    assert (
        load_recipe(recipe).logging.progress == load_recipe(recipe, ["logging.progress=off"]).logging.progress == "off"
    )


def test_a_base_may_have_bases_and_be_named_twice(tmp_path):
    write(tmp_path / "base.yaml", changed({"seed": 1}))
    write(tmp_path / "a.yaml", {"defaults": ["base.yaml"], "seed": 2})
    write(tmp_path / "b.yaml", {"defaults": ["base.yaml"], "optimizer": {"lr": 0.7}})
    loaded = load_recipe(write(tmp_path / "r.yaml", {"defaults": ["a.yaml", "b.yaml"]}))
    assert (loaded.seed, loaded.optimizer.lr) == (1, 0.7), "b brings base again, later than a"


def test_interpolation_reads_the_environment_and_other_fields(tmp_path, monkeypatch):
    write(
        tmp_path / "base.yaml",
        changed({"seed": "${oc.decode:${oc.env:SEED_OF_TEST,5}}", "train.epochs": "${train.minibatches}"}),
    )
    recipe = write(tmp_path / "r.yaml", {"defaults": ["base.yaml"], "train": {"minibatches": 2}})
    monkeypatch.delenv("SEED_OF_TEST", raising=False)
    assert (load_recipe(recipe).seed, load_recipe(recipe).train.epochs) == (5, 2)
    recipe.write_text(recipe.read_text() + "name: ${oc.env:NAME_OF_TEST}\n")
    with pytest.raises(ConfigurationError, match="NAME_OF_TEST"):
        load_recipe(recipe)
    monkeypatch.setenv("NAME_OF_TEST", "from-outside")
    assert load_recipe(recipe).name == "from-outside"


BAD_DEFAULTS = {
    "circle": (
        {"defaults": ["a.yaml"]},
        r"a\.yaml: defaults must not lead back to a recipe, got a\.yaml -> b\.yaml -> a\.",
    ),
    "itself": ({"defaults": ["r.yaml"]}, r"got r\.yaml -> r\.yaml; take one out"),
    "missing": (
        {"defaults": ["gone.yaml"]},
        r"gone\.yaml: cannot read the recipe .* which .*r\.yaml names in defaults",
    ),
    "no list": ({"defaults": "a.yaml"}, r"defaults: must be a list of recipe files, got 'a\.yaml'; write"),
}


@pytest.mark.parametrize("case", BAD_DEFAULTS)
def test_defaults_that_cannot_be_read(case, tmp_path):
    tree, message = BAD_DEFAULTS[case]
    write(tmp_path / "a.yaml", {"defaults": ["b.yaml"]})
    write(tmp_path / "b.yaml", {"defaults": ["a.yaml"], **BASE})
    with pytest.raises(ConfigurationError, match=message):
        load_recipe(write(tmp_path / "r.yaml", tree))


def test_eight_mistakes_are_eight_lines(tmp_path, capsys):
    mistakes = {
        "sede": 1,
        "device": "gpu",
        "optimizer.lr": 0.0,
        "optimizer.beta1": 1.0,
        "train.steps": 2.5,
        "train.microbatch.max_token": 64,
        "loss.surrogate": {"type": "ppo_clip", "clip_lo": 0.2},
        "parallel.tensor": 0,
    }
    recipe = write(tmp_path / "r.yaml", changed(mistakes))
    assert main(["validate", str(recipe)]) == 2
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == f"error: {recipe}: 8 errors" and len(lines) == 8
    fields = {line.split(":")[0].strip() for line in lines}
    assert fields == {*mistakes, "loss.surrogate.clip_lo"} - {"loss.surrogate"}
    assert sum("did you mean" in line for line in lines) == 3


def test_an_unknown_task_is_a_line_beside_the_others(tmp_path, capsys):
    recipe = write(tmp_path / "r.yaml", changed({"rollouts.task": "srot", "train.steps": 2.5}))
    assert main(["validate", str(recipe)]) == 2
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == f"error: {recipe}: 2 errors" and len(lines) == 2
    (task,) = [line for line in lines if line.startswith("  rollouts.task: ")]
    assert "got 'srot'" in task and "did you mean" in task


def test_a_teacher_belongs_to_distillation():
    from megatron_support.config import Recipe

    with pytest.raises(ConfigurationError, match=r"teacher\.checkpoint must be null with grpo advantages"):
        Recipe.from_dict(changed({"teacher.checkpoint": {"type": "random"}}))
    with pytest.raises(ConfigurationError, match=r"teacher\.checkpoint is required for opd advantages of sampled"):
        Recipe.from_dict(changed({"advantages": {"type": "opd"}}))
