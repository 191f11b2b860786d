"""What a run exports, transformers reads with equal logits: whatever layout saved it."""

import json
import os
import sys

import pytest
import torch

from megatron_support.config.recipe import ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.checkpoint import save_checkpoint
from megatron_support.megatron.weights.export import export_huggingface
from megatron_support.megatron.weights.huggingface import HuggingFaceSource
from megatron_support.training.export import export_checkpoint
from tests.command_line import command
from tests.megatron.tiny import TINY, last_stage, tiny_model, tokens, whole_logits
from tests.ranks import run_ranks

transformers = pytest.importorskip(
    "transformers", reason="parity needs the hf extra: pip install 'megatron-support[hf]'"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "llama": {"rope_scaling": LLAMA3_ROPE, "rope_base": 500.0, "tie_embeddings": False},
    "qwen2": {"qkv_bias": True, "tie_embeddings": False, "norm_epsilon": 1e-6},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}
LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tensor=2),
    "pp2-vpp2": ParallelConfig(pipeline=2, virtual_pipeline=2),
}


def _save(rank, world, parallel, folder, architecture, dtype="float32"):
    model, groups = tiny_model(parallel, architecture=architecture, dtype=dtype)
    with torch.no_grad():
        for name, parameter in (named for chunk in model.bare_chunks for named in chunk.named_parameters()):
            parameter.mul_(8)  # large, so that attention and norms matter
            if name.endswith("bias") or parameter.dim() == 1:
                generator = torch.Generator().manual_seed(len(name))
                noise = torch.randn(parameter.numel() * world, generator=generator)
                part = rank if getattr(parameter, "tensor_model_parallel", False) else 0  # norms are whole everywhere
                parameter.copy_(1 + 0.3 * noise.chunk(world)[part])
    save_checkpoint(folder, model, step=3)
    return whole_logits(model, tokens(), groups, packed=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_it_with_equal_logits(kind, layout, tmp_path):
    parallel, architecture = LAYOUTS[layout], TINY.model_copy(update=KINDS[kind])
    saved, out = tmp_path / "saved", tmp_path / "out"
    expected = last_stage(run_ranks(parallel.tensor * parallel.pipeline, _save, parallel, saved, architecture))
    run_ranks(1, lambda rank, world: str(export_checkpoint(saved, out)))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    assert model.config.model_type == kind and model.dtype == torch.float32
    with torch.no_grad():
        logits = torch.cat([model(sequence[None]).logits[0] for sequence in tokens()])
    assert expected.abs().mean() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_it_is_what_was_loaded_bit_by_bit_in_several_files(tmp_path):
    """Every tensor of random weights comes back, through files of at most 20 kB."""

    def on_rank(rank, world):
        model, _ = tiny_model()
        export_huggingface(model, tmp_path / "out", max_file_bytes=20_000)

    run_ranks(1, on_rank)
    from megatron_support.megatron.weights.names import tensor_shapes
    from megatron_support.megatron.weights.source import RandomSource

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    source, drawn = HuggingFaceSource(tmp_path / "out"), RandomSource(TINY, 5)
    for name in tensor_shapes(TINY):
        assert torch.equal(source.tensor(name), drawn.tensor(name)), name
    assert source.architecture.model_dump(exclude={"head_dim"}) == TINY.model_dump(exclude={"head_dim"})


def test_its_files_have_the_rights_of_any_file(tmp_path):
    def on_rank(rank, world):
        model, _ = tiny_model()
        for umask, rights in ((0o022, 0o644), (0o027, 0o640)):
            os.umask(umask)  # of this forked rank alone
            export_huggingface(model, tmp_path / f"{umask:o}", max_file_bytes=20_000)
            files = list((tmp_path / f"{umask:o}").iterdir())
            assert len(files) > 3 and {file.stat().st_mode & 0o777 for file in files} == {rights}

    run_ranks(1, on_rank)


def test_without_the_extra_nothing_is_made(tmp_path):
    run_ranks(1, _save, ParallelConfig(), tmp_path / "saved", TINY)

    def on_rank(rank, world):
        sys.modules["safetensors"] = None  # importing it is an ImportError
        with pytest.raises(ConfigurationError, match=r"need the package safetensors; pip install"):
            export_huggingface(tiny_model()[0], tmp_path / "library")
        return command(rank, world, tmp_path, ["export", "saved", "out/folder"])

    ((code, _, shown),) = run_ranks(1, on_rank)
    assert code == 2 and shown.endswith("need the package safetensors; pip install 'megatron-support[hf]'\n"), shown
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_bfloat16_stays_bfloat16(tmp_path):
    run_ranks(1, _save, ParallelConfig(), tmp_path / "saved", TINY, "bfloat16")
    run_ranks(1, lambda rank, world: str(export_checkpoint(tmp_path / "saved", tmp_path / "out")))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_what_cannot_be_exported_is_refused(tmp_path):
    def on_rank(rank, world):
        with pytest.raises(ConfigurationError, match="must be a checkpoint, or a run folder with one"):
            export_checkpoint(tmp_path, tmp_path / "out")
        model, _ = tiny_model(architecture=TINY.model_copy(update={"qkv_bias": True, "qk_norm": True}))
        with pytest.raises(ConfigurationError, match="has both qkv_bias and qk_norm"):
            export_huggingface(model, tmp_path / "out")
        (tmp_path / "full" / "file").mkdir(parents=True)
        with pytest.raises(ConfigurationError, match="must be an empty folder"):
            export_huggingface(tiny_model()[0], tmp_path / "full")

    run_ranks(1, on_rank)
