"""What one layout saves another loads, and a continued run is the uninterrupted one."""

import shutil

import pytest
import torch

from megatron_support.config.recipe import (
    MegatronWeights,
    ModelConfig,
    OptimizerSettings,
    ParallelConfig,
    ScheduleConfig,
)
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.checkpoint import load_checkpoint, save_checkpoint
from megatron_support.megatron.model import build_model, wrap_ddp
from megatron_support.megatron.optimizer import build_optimizer
from tests.core_version import CORE
from tests.megatron.tiny import TINY, last_stage, ready, run_pipeline, tiny_model, token_batch, tokens, whole_logits
from tests.ranks import run_ranks

TP2 = ParallelConfig(tensor=2)


def _save_weights(rank, world, parallel, folder, architecture=TINY):
    model, groups = tiny_model(parallel, architecture=architecture)
    save_checkpoint(folder, model, step=7)
    return whole_logits(model, tokens(), groups, packed=True)


def _load_weights(rank, world, parallel, folder, architecture=TINY):
    """Through the recipe's ``weights.type: megatron``, over another seed's random weights."""
    groups = ready(parallel)
    weights = MegatronWeights(type="megatron", path=str(folder))
    config = ModelConfig(architecture=architecture, weights=weights, dtype="float32")
    model = build_model(config, parallel, groups, seed=999)
    return whole_logits(model, tokens(), groups, packed=True)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (TP2, ParallelConfig()),
        (ParallelConfig(), TP2),
        (ParallelConfig(pipeline=2, virtual_pipeline=2), ParallelConfig()),
        (TP2, ParallelConfig(pipeline=2)),
    ],
    ids=["tp2-to-one", "one-to-tp2", "vpp-to-one", "tp2-to-pp2"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_go_from_any_layout_to_any_other(tmp_path, saved, loaded, tied):
    architecture = TINY.model_copy(update={"tie_embeddings": tied})
    ranks = lambda parallel: parallel.tensor * parallel.pipeline
    expected = last_stage(run_ranks(ranks(saved), _save_weights, saved, tmp_path / "saved", architecture))
    logits = last_stage(run_ranks(ranks(loaded), _load_weights, loaded, tmp_path / "saved", architecture))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def _train(rank, world, parallel, distributed, dtype, updates, save=None, load=None):
    """``updates`` steps on a fixed batch; logits afterwards, as fp32."""
    settings = OptimizerSettings(
        lr=0.01, weight_decay=0.1, distributed=distributed, schedule=ScheduleConfig(type="linear", warmup_steps=1)
    )
    model, groups = tiny_model(parallel, dtype=dtype, seed=5 if load is None else 999)
    model = wrap_ddp(model, distributed_optimizer=distributed)
    optimizer, scheduler = build_optimizer(settings, model.chunks, 8)
    start = 0
    if load is not None:
        start = load_checkpoint(load, model, optimizer=optimizer, scheduler=scheduler).step
    batch = token_batch(tokens(seed=groups.data_rank), packed=True, groups=groups)
    for _ in range(start, updates):
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run_pipeline(model, [batch], groups, loss=lambda x: (x.float().square() + x.float().sin()).sum() / 1000)
        model.config.finalize_model_grads_func(list(model.chunks))
        assert optimizer.step()[0]
        scheduler.step(1)
    if save is not None:
        save_checkpoint(save, model, optimizer=optimizer, scheduler=scheduler, step=updates)
    return whole_logits(model, tokens(), groups, packed=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_a_continued_run_is_the_uninterrupted_one(tmp_path, dtype, distributed):
    data2 = ParallelConfig()
    straight = run_ranks(2, _train, data2, distributed, dtype, 4)[0]
    run_ranks(2, _train, data2, distributed, dtype, 2, save=tmp_path / "half")
    continued = run_ranks(2, _train, data2, distributed, dtype, 4, load=tmp_path / "half")[0]
    torch.testing.assert_close(continued, straight, rtol=0, atol=0)


def test_optimizer_state_moves_to_another_layout(tmp_path):
    straight = last_stage(run_ranks(2, _train, TP2, True, "float32", 4))
    run_ranks(2, _train, TP2, True, "float32", 2, save=tmp_path / "half")
    moved = run_ranks(1, _train, ParallelConfig(), True, "float32", 4, load=tmp_path / "half")[0]
    # Adam divides by gradients near 0, so the layouts' rounding shows a little more than in the logits alone
    torch.testing.assert_close(moved, straight, rtol=0, atol=2e-5)


def test_misuse_is_refused(tmp_path):
    saved = tmp_path / "saved"
    run_ranks(1, _save_weights, ParallelConfig(), saved)

    def again(rank, world):
        with pytest.raises(ConfigurationError, match="must be empty; choose another"):
            save_checkpoint(saved, tiny_model(TP2)[0])

    def other_architecture(rank, world):
        model, _ = tiny_model(architecture=TINY.model_copy(update={"ffn_hidden_size": 64}))
        with pytest.raises(
            ConfigurationError, match=r"got ffn_hidden_size 48 instead of 64; correct model.architecture"
        ):
            load_checkpoint(saved, model)

    def no_checkpoint(rank, world):
        with pytest.raises(ConfigurationError, match="must be a folder written by Megatron-Core"):
            load_checkpoint(tmp_path, tiny_model()[0])

    def no_optimizer(rank, world):
        model = wrap_ddp(tiny_model()[0])
        optimizer, _ = build_optimizer(OptimizerSettings(lr=0.1), model.chunks, 1)
        with pytest.raises(ConfigurationError, match="has no optimizer state"):
            load_checkpoint(saved, model, optimizer=optimizer)

    run_ranks(2, again)
    for action in (other_architecture, no_checkpoint, no_optimizer):
        run_ranks(1, action)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_checkpoint_is_a_message(tmp_path, ranks):
    saved = tmp_path / "saved"
    run_ranks(1, _save_weights, ParallelConfig(), saved)
    damages = {
        ".metadata": [None, b"garbage"],
        "metadata.json": [b"{", b"[]"],
        "__0_0.distcp": [None, b"", (saved / "__0_0.distcp").read_bytes()[:200]],
    }
    common = saved / "common.pt"
    assert common.exists() == (CORE < (0, 19)), "the common state is among the shards since Megatron-Core 0.19"
    if common.exists():
        damages["common.pt"] = [None, b"", b"garbage", common.read_bytes()[:-300]]
    folders = []
    for name, contents in damages.items():
        for number, content in enumerate(contents):
            folders.append(tmp_path / f"{name}-{number}")
            shutil.copytree(saved, folders[-1])
            (folders[-1] / name).unlink()
            if content is not None:
                (folders[-1] / name).write_bytes(content)

    def load_all(rank, world):
        model, _ = tiny_model(ParallelConfig(), architecture=TINY)
        for folder in folders:
            with pytest.raises(ConfigurationError, match=r"the checkpoint is (damaged|incomplete)"):
                load_checkpoint(folder, model)

    run_ranks(ranks, load_all)


def test_the_latest_iteration_of_a_megatron_lm_folder_is_taken(tmp_path):
    expected = run_ranks(1, _save_weights, ParallelConfig(), tmp_path / "iter_0000007")[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    torch.testing.assert_close(run_ranks(1, _load_weights, ParallelConfig(), tmp_path)[0], expected, rtol=0, atol=0)
