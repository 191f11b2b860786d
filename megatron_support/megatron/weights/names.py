"""The tensors of a Llama-family decoder, under the names of Hugging Face's files: what every source speaks."""

from __future__ import annotations

from megatron_support.config.layout import head_dim, query_groups
from megatron_support.config.recipe import Architecture, MixtureOfExperts

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


def layer_name(layer: int, name: str) -> str:
    """Full name of a tensor of a layer, counted from 0 over the whole model."""
    return f"model.layers.{layer}.{name}"


def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in the order of the network.

    The output layer is left out where it is tied to the embedding.
    """
    hidden, ffn, size = architecture.hidden_size, architecture.ffn_hidden_size, head_dim(architecture)
    queries, keys = architecture.num_attention_heads * size, query_groups(architecture) * size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    layer |= _mlp_shapes("mlp", hidden, ffn) if architecture.moe is None else _expert_shapes(architecture.moe, hidden)
    if architecture.qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if architecture.qk_norm:
        layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (architecture.vocab_size, hidden)}
    for index in range(architecture.num_layers):
        shapes |= {layer_name(index, name): shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (hidden,)
    if not architecture.tie_embeddings:
        shapes[OUTPUT] = (architecture.vocab_size, hidden)
    return shapes


def _mlp_shapes(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (ffn, hidden),
        f"{prefix}.up_proj.weight": (ffn, hidden),
        f"{prefix}.down_proj.weight": (hidden, ffn),
    }


def _expert_shapes(moe: MixtureOfExperts, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (moe.num_experts, hidden)}
    for expert in range(moe.num_experts):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}", hidden, moe.ffn_hidden_size)
    if moe.shared_expert_ffn_hidden_size is not None:
        shapes |= _mlp_shapes("mlp.shared_expert", hidden, moe.shared_expert_ffn_hidden_size)
    if moe.shared_expert_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes
