"""What a run that goes on says of its recipe: every field that is not the checkpoint's, one line each."""

from megatron_support.config import Recipe
from megatron_support.training.recipe_changes import recipe_changes
from tests.unit.test_config import changed


def saved(**changes):
    return Recipe.from_dict(changed(changes)).model_dump(mode="json")


def test_fields_of_one_of_the_recipes_alone_count():
    """Another type has other fields, and another version of this package too."""
    before = saved(**{"loss.surrogate": {"type": "sapo"}})
    before["train"]["gone"] = None
    del before["seed"]
    lines = recipe_changes(before, Recipe.from_dict(changed({"loss.surrogate": {"type": "ppo_clip"}})))
    assert "train.gone: null in the checkpoint, not there in this recipe" in lines
    assert "seed: not there in the checkpoint, 1234 in this recipe" in lines
    assert "loss.surrogate.tau_negative: 1.05 in the checkpoint, not there in this recipe" in lines
    assert any(line.startswith("loss.surrogate.clip_low: not there in the checkpoint, ") for line in lines)
    assert not any(line.startswith("the learning rate") for line in lines)


def test_what_is_logged_and_kept_is_no_change():
    now = {"logging.run_dir": "elsewhere", "checkpoint": {"every": 3}, "may_read": ["folder"]}
    assert recipe_changes(saved(), Recipe.from_dict(changed(now))) == []


def test_the_learning_rate_stays_on_the_schedule_of_the_checkpoint():
    for field, value in (("optimizer.lr", 0.5), ("optimizer.schedule.type", "cosine"), ("train.steps", 77)):
        line, note = recipe_changes(saved(), Recipe.from_dict(changed({field: value})))
        assert line.startswith(f"{field}: ") and line.endswith(" in this recipe")
        assert note.startswith("the learning rate goes on by the checkpoint's schedule")


def test_a_long_value_is_cut():
    weights = {"type": "huggingface", "path": "/" + "folder/" * 100}
    now = {"model": {"weights": weights}}
    (line,) = [line for line in recipe_changes(saved(), Recipe.from_dict(changed(now))) if "weights.path" in line]
    assert line.endswith("... in this recipe") and len(line) < 200
