"""Where a run begins: what checkpoint.resume finds on the disk."""

import pytest

from megatron_support.config import Recipe
from megatron_support.errors import ConfigurationError
from megatron_support.training.resume import Start, find_start
from megatron_support.training.saved import CHECKPOINT, CHECKPOINTS, STEP
from tests.unit.test_config import changed


def start(resume) -> Start:
    return find_start(Recipe.from_dict(changed({"checkpoint": {"resume": str(resume)}})))


def checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text("{}")
    return folder


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path):
    checkpoint(tmp_path / CHECKPOINTS / f"{STEP}2")
    newest = checkpoint(tmp_path / CHECKPOINTS / f"{STEP}10")
    assert start(tmp_path) == Start(run=tmp_path, checkpoint=newest)


def test_a_checkpoint_begins_a_new_run(tmp_path):
    folder = checkpoint(tmp_path / CHECKPOINTS / f"{STEP}2")
    assert start(folder) == Start(checkpoint=folder)


def test_final_weights_are_not_gone_on_from(tmp_path):
    checkpoint(tmp_path / CHECKPOINT)
    with pytest.raises(ConfigurationError, match=r"kept its final weights alone; train with checkpoint\.every"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_path_without_a_checkpoint_is_named(tmp_path, name):
    with pytest.raises(ConfigurationError, match=r"or a checkpoint, got .*; correct the path"):
        start(tmp_path / name)
