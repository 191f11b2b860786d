"""Megatron's logits are Hugging Face's, for every supported kind of model and layout; bad folders are refused."""

import json
import shutil

import pytest
import torch

from megatron_support.config.recipe import HuggingFaceWeights, ModelConfig, ParallelConfig
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.model import build_model
from megatron_support.megatron.weights import load_weights, read_architecture
from megatron_support.megatron.weights.huggingface import HuggingFaceSource
from tests.megatron.tiny import TINY, last_stage, ready, tiny_model, tokens, whole_logits
from tests.ranks import run_ranks

transformers = pytest.importorskip(
    "transformers", reason="parity needs the hf extra: pip install 'megatron-support[hf]'"
)

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # large, so that attention and norms matter
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _config(kind):
    if kind == "llama_tied":
        return transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5)
    if kind == "llama_untied_llama3_rope":
        return transformers.LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE)
    if kind == "qwen2_untied":
        return transformers.Qwen2Config(**SIZES, tie_word_embeddings=False)
    if kind == "qwen3_moe_untied":
        return transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False, head_dim=16)
    assert kind == "qwen3_tied"
    return transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, head_dim=16)


KINDS = ("llama_tied", "llama_untied_llama3_rope", "qwen2_untied", "qwen3_tied", "qwen3_moe_untied")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """kind -> (folder, logits ``[sum of lengths, V]``); biases and norms are drawn too, so that they matter."""
    folders = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.copy_(0.3 * torch.randn_like(parameter) + (0.0 if name.endswith("bias") else 1.0))
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder, max_shard_size="20KB" if kind == "qwen3_tied" else "1GB")
            folders[kind] = folder, torch.cat([model(sequence[None]).logits[0] for sequence in tokens()])
    return folders


def _load(rank, world, folder, parallel):
    groups = ready(parallel)
    config = ModelConfig(weights=HuggingFaceWeights(type="huggingface", path=str(folder)), dtype="float32")
    model = build_model(config, parallel, groups, seed=0)
    return whole_logits(model, tokens(), groups, packed=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["one", "tp2", "pp2"])
def test_logits_are_hugging_faces(saved, kind, layout):
    folder, expected = saved[kind]
    if kind.startswith("qwen3_moe") and "tensor" in layout:
        layout = layout | {"sequence": True, "expert": 2}
    parallel = ParallelConfig(**layout)
    logits = last_stage(run_ranks(parallel.tensor * parallel.pipeline, _load, folder, parallel))
    assert expected.abs().mean() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("change", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_a_layer_without_experts_among_layers_with_them_is_refused(saved, tmp_path, change):
    with pytest.raises(ConfigurationError, match="every layer must have experts"):
        HuggingFaceSource(_copy(saved["qwen3_moe_untied"][0], tmp_path, **change))


def test_rope_scaling_changes_the_logits(saved, tmp_path):
    folder, expected = saved["llama_untied_llama3_rope"]
    copy = _copy(folder, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    assert (run_ranks(1, _load, copy, ParallelConfig())[0] - expected).abs().max() > 1e-3


def test_sharded_folder_was_sharded(saved):
    assert (saved["qwen3_tied"][0] / "model.safetensors.index.json").is_file()


def test_architecture_is_read_from_both_forms_of_the_config(saved, tmp_path):
    weights = lambda path: HuggingFaceWeights(type="huggingface", path=str(path))
    folder, _ = saved["llama_untied_llama3_rope"]
    new = read_architecture(weights(folder))
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = read_architecture(
        weights(_copy(folder, tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling))
    )
    assert old == new
    assert (new.rope_base, new.rope_scaling["factor"], new.tie_embeddings, new.qkv_bias) == (500.0, 4.0, False, False)
    qwen3 = read_architecture(weights(saved["qwen3_tied"][0]))
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias, qwen3.tie_embeddings) == (16, True, False, True)
    assert read_architecture(weights(saved["qwen2_untied"][0])).qkv_bias
    folder, _ = saved["qwen3_moe_untied"]
    experts = read_architecture(weights(folder)).moe
    assert (experts.num_experts, experts.top_k, experts.ffn_hidden_size, experts.normalize_top_k) == (4, 2, 24, True)
    first = _copy(folder, tmp_path / "first", num_local_experts=None, num_experts=4)  # as the model was published
    assert read_architecture(weights(first)).moe == experts


def _copy(folder, target, **changes):
    target = target / "copy"
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, r"model_type must be one of llama, qwen2, qwen3, qwen3_moe, got 'mixtral'"),
        ({"hidden_act": "gelu"}, r"hidden_act must be silu, got 'gelu'"),
        ({"attention_bias": True}, r"attention_bias must be false"),
        ({"quantization_config": {"bits": 4}}, r"must not be quantised"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            r"rope_type must be default or llama3, got 'yarn'",
        ),
        ({"num_hidden_layers": None}, r"config.json: num_hidden_layers must be an integer >= 1, got None"),
        ({"num_hidden_layers": 5}, r"9 missing: model.layers.4.input_layernorm.weight, .*, \.\.\.; use a complete"),
        ({"num_hidden_layers": 3}, r"9 not of this architecture: model.layers.3"),
        (
            {"intermediate_size": 64},
            r"12 of another shape: model.layers.0.mlp.gate_proj.weight \(48, 32\) instead of \(64,",
        ),
        ({"tie_word_embeddings": False}, r"1 missing: lm_head.weight"),
        ({"num_key_value_heads": "x"}, r"config.json: 1 error\n  num_query_groups: must be a valid integer, got 'x'"),
        ({"rms_norm_eps": [1]}, r"norm_epsilon: must be a valid number, got \[1\]"),
        ({"rope_parameters": "x"}, r"config.json: rope_parameters must be a mapping, got 'x'"),
    ],
)
def test_unsupported_or_incomplete_model(saved, tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        HuggingFaceSource(_copy(saved["llama_tied"][0], tmp_path, **changes))


HUGE = 2**70


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [
        ("vocab_size", "vocab_size", 2**24),
        ("num_hidden_layers", "num_layers", 2**12),
        ("hidden_size", "hidden_size", 2**20),
        ("num_attention_heads", "num_attention_heads", 2**14),
        ("num_key_value_heads", "num_query_groups", 2**14),
        ("head_dim", "head_dim", 2**20),
        ("intermediate_size", "ffn_hidden_size", 2**20),
        ("max_position_embeddings", "max_sequence_length", 2**30),
    ],
)
def test_sizes_beyond_any_model_are_refused(saved, tmp_path, name, field, most):
    for number, value in enumerate((HUGE, most + 1)):
        folder = _copy(saved["llama_tied"][0], tmp_path / str(number), **{name: value})
        with pytest.raises(ConfigurationError, match=rf"{field}: must be less than or equal to {most}, got {value};"):
            HuggingFaceSource(folder)


@pytest.mark.parametrize(("name", "value"), [("factor", 10**400), ("original_max_position_embeddings", HUGE)])
def test_a_rope_scaling_beyond_any_model_is_refused(saved, tmp_path, name, value):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = _copy(saved["llama_tied"][0], tmp_path, rope_parameters=rope | {name: value})
    with pytest.raises(ConfigurationError, match=rf"rope_scaling: {name} must be a number in \(0, "):
        HuggingFaceSource(folder)


def test_experts_beyond_any_model_are_refused(saved, tmp_path):
    (kind,) = [kind for kind in saved if "moe" in kind]
    for number, (count, message) in enumerate(((HUGE, "less than or equal to 4096"), (4096, "x 4096; lower one"))):
        changes = {"num_local_experts": count, "num_hidden_layers": 64}
        with pytest.raises(ConfigurationError, match=message):
            HuggingFaceSource(_copy(saved[kind][0], tmp_path / str(number), **changes))


def test_unreadable_folders(saved, tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be a folder with config.json .*, got 'org/name'; download"):
        HuggingFaceSource("org/name")
    broken = _copy(saved["llama_tied"][0], tmp_path)
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigurationError, match="not a readable safetensors file"):
        HuggingFaceSource(broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"model.safetensors: file is missing"):
        HuggingFaceSource(broken)
    (broken / "pytorch_model.bin").touch()
    with pytest.raises(
        ConfigurationError, match=r"found only .bin files; load the model with transformers and save it"
    ):
        HuggingFaceSource(broken)
    for named in ([1], "../copy/model.safetensors", "/etc/passwd", "a\0b"):
        (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
        with pytest.raises(ConfigurationError, match="'weight_map' must name files of its own folder, got"):
            HuggingFaceSource(broken)
    (broken / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ConfigurationError, match="not a readable JSON file"):
        HuggingFaceSource(broken)
    (broken / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="not a readable JSON file"):
        HuggingFaceSource(broken)


def test_weights_of_another_architecture_do_not_go_into_a_model(saved):
    def on_rank(rank, world):
        model, groups = tiny_model(architecture=TINY.model_copy(update={"ffn_hidden_size": 64}))
        with pytest.raises(ConfigurationError, match=r"ffn_hidden_size 48 instead of 64"):
            load_weights(model, HuggingFaceWeights(type="huggingface", path=str(saved["llama_tied"][0])), groups=groups)

    run_ranks(1, on_rank)
