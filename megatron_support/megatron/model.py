"""Recipe -> Megatron-Core GPTModel chunks of this rank, their wrappers, and one microbatch through a chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_support.config.layout import head_dim, query_groups, validate_layout
from megatron_support.config.recipe import Architecture, ModelConfig, ParallelConfig
from megatron_support.distributed.groups import ParallelGroups
from megatron_support.errors import ConfigurationError
from megatron_support.megatron.attention import EagerCoreAttention
from megatron_support.megatron.host import seed_generators, setup_host
from megatron_support.megatron.parts import ModelParts
from megatron_support.megatron.rope import rotary_frequencies
from megatron_support.megatron.weights import load_weights, model_architecture

_VOCABULARY_MULTIPLE = 128
# with two stages, batched point-to-point calls mix up the chunks' tensors
_INTERLEAVED_P2P = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_NOISE = (
    "full scope is deprecated",
    "If you are using transformer_engine as the transformer impl",
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # an expert's own size
)
_INIT_METHODS = {"init_method", "output_layer_init_method", "embedding_init_method"}


def build_model(
    model_config: ModelConfig,
    parallel_config: ParallelConfig,
    groups: ParallelGroups,
    *,
    seed: int,
    dtype: torch.dtype | None = None,
    calculate_per_token_loss: bool = False,
    device: torch.device | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ModelParts:
    """Build this rank's model chunks and fill them with the recipe's weights. Collective.

    Args:
        model_config: architecture, weights, dtype, layers.
        parallel_config: the layout that ``groups`` were made for.
        groups: from :func:`megatron_support.megatron.initialize_parallel`.
        seed: of random weights and of Megatron's RNG tracker.
        dtype: instead of ``model_config.dtype``; float64 is allowed for gradient checks.
        calculate_per_token_loss: Megatron's flag. DDP reads it when it wraps the model, so it is chosen here.
        device: None for that of :func:`megatron_support.megatron.setup_host`.
        overrides: fields of TransformerConfig to set besides, e.g. ``{"recompute_granularity": "full"}``.

    Returns:
        Bare chunks (fp32), or chunks in Float16Module (bf16). Wrap them with :func:`wrap_ddp` to train.

    Raises:
        ConfigurationError: the layout does not fit the architecture, or weights are missing or unreadable.
    """
    architecture = model_architecture(model_config)
    validate_layout(architecture, parallel_config, groups.world_size)
    device = setup_host().device if device is None else device
    dtype = dtype or {"float32": torch.float32, "bfloat16": torch.bfloat16}[model_config.dtype]
    implementation = resolve_implementation(model_config.transformer_impl, device)
    seed_generators(seed)
    padded = padded_vocab_size(architecture.vocab_size, parallel_config.tensor)
    stages = parallel_config.virtual_pipeline or 1
    with _quiet():
        config = transformer_config(
            architecture,
            parallel_config,
            dtype=dtype,
            device=device,
            implementation=implementation,
            calculate_per_token_loss=calculate_per_token_loss,
            overrides=overrides or {},
        )
        chunks = [
            _build_chunk(architecture, config, groups, padded, implementation, stage if stages > 1 else None, stages)
            for stage in range(stages)
        ]
    parts = ModelParts(
        chunks=tuple(_in_precision(chunk.to(device), config) for chunk in chunks),
        config=config,
        architecture=architecture,
        padded_vocab_size=padded,
        device=device,
        virtual_pipeline=parallel_config.virtual_pipeline,
    )
    load_weights(parts, model_config.weights, groups=groups, seed=seed)
    return parts


def wrap_ddp(model: ModelParts, *, distributed_optimizer: bool = False, **overrides: Any) -> ModelParts:
    """The same model with each chunk in Megatron's DistributedDataParallel, and the schedule's hooks set.

    Sets ``finalize_model_grads_func`` and ``no_sync_func`` of the shared TransformerConfig; a caller may replace them.

    Args:
        model: from :func:`build_model`.
        distributed_optimizer: for DistributedOptimizer.
        overrides: fields of DistributedDataParallelConfig, e.g. ``overlap_grad_reduce=True``.
    """
    settings = {
        "use_distributed_optimizer": distributed_optimizer,
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": False,
    }
    ddp_config = DistributedDataParallelConfig(**(settings | overrides))
    chunks = tuple(
        DistributedDataParallel(model.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(model.chunks)
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    hooks = [chunk.no_sync for chunk in chunks]
    model.config.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
    return replace(model, chunks=chunks)


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding: the next multiple of 128 that the tensor-parallel size divides.

    It is the same for every tensor-parallel size that divides 128, so layouts and checkpoints are interchangeable.
    """
    multiple = math.lcm(_VOCABULARY_MULTIPLE, tensor)
    return -(-vocab_size // multiple) * multiple


def resolve_implementation(asked: str, device: torch.device) -> str:
    """ "local" or "transformer_engine" for a recipe's ``transformer_impl``.

    Raises:
        ConfigurationError: Transformer Engine was asked for and cannot be used.
    """
    available = device.type != "cpu" and getattr(gpt_layer_specs, "HAVE_TE", False)
    if asked == "auto":
        return "transformer_engine" if available else "local"
    if asked == "transformer_engine" and not available:
        reason = "no GPU is used" if device.type == "cpu" else "it cannot be imported"
        raise ConfigurationError(
            f"model.transformer_impl must be auto or local here, got 'transformer_engine' but {reason}; "
            "use local, or pip install 'megatron-support[te]' on a machine with a GPU"
        )
    return asked


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    calculate_per_token_loss: bool,
    overrides: Mapping[str, Any],
) -> TransformerConfig:
    """Megatron's configuration of a Llama-family decoder.

    Raises:
        ConfigurationError: ``overrides`` has a field that TransformerConfig has not, or one that must not be changed.
    """
    _check_overrides(overrides, parallel)
    gpu = device.type != "cpu"
    settings: dict[str, Any] = dict(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=query_groups(architecture),
        kv_channels=head_dim(architecture),
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence,
        calculate_per_token_loss=calculate_per_token_loss,
        # every parameter is written afterwards, whatever the weights; but Megatron must initialise, because that is
        # where it tags tensor-parallel parameters, and without the tag their gradient norm counts one rank only
        perform_initialization=True,
        use_cpu_initialization=False,
        **dict.fromkeys(_INIT_METHODS & _config_fields(), _leave),
        # fused kernels need a GPU; on the CPU they would be compiled for nothing
        bias_activation_fusion=gpu,
        bias_dropout_fusion=gpu,
        apply_rope_fusion=gpu and implementation == "transformer_engine",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    if parallel.virtual_pipeline is not None:
        settings |= _INTERLEAVED_P2P
    settings |= _recompute_settings(parallel)
    settings |= _expert_settings(architecture, parallel, dtype)
    return TransformerConfig(**(settings | dict(overrides)))


def _expert_settings(architecture: Architecture, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    moe = architecture.moe
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_pre_softmax": not moe.normalize_top_k,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coef else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coef,
        "moe_z_loss_coeff": moe.z_loss_coef or None,
        "moe_shared_expert_intermediate_size": moe.shared_expert_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        # the dispatcher that allows microbatches of any shape and drops nothing
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


def _recompute_settings(parallel: ParallelConfig) -> dict[str, Any]:
    recompute = parallel.recompute
    if recompute is None:
        return {}
    if recompute.type == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }


def _config_fields() -> set[str]:
    return {field.name for field in dataclasses.fields(TransformerConfig)}


def _check_overrides(overrides: Mapping[str, Any], parallel: ParallelConfig) -> None:
    unknown = sorted(set(overrides) - _config_fields())
    if unknown:
        raise ConfigurationError(
            f"overrides must be fields of TransformerConfig, got {', '.join(unknown)}; remove them"
        )
    if overrides.get("mtp_num_layers"):
        raise ConfigurationError(
            f"overrides: mtp_num_layers must be null, got {overrides['mtp_num_layers']}: multi-token prediction adds a "
            "loss over every token, of prompts and responses alike; remove it"
        )
    for name, value in _INTERLEAVED_P2P.items():
        if parallel.virtual_pipeline is not None and overrides.get(name, value) != value:
            raise ConfigurationError(
                f"overrides: {name} must be {value} with virtual_pipeline, got {overrides[name]}; "
                "anything else gives silently wrong gradients; remove it"
            )


def _leave(weight: Tensor) -> None:
    """An initialisation that draws nothing."""


def _build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    groups: ParallelGroups,
    padded: int,
    implementation: str,
    stage: int | None,
    stages: int,
) -> GPTModel:
    """One chunk; ``stage`` of ``stages`` on this pipeline rank, None without interleaving."""
    layers = config.num_layers // (groups.pipeline_size * stages)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, implementation, layers),
        vocab_size=padded,
        max_sequence_length=architecture.max_sequence_length,
        pre_process=groups.is_first_stage and stage in (None, 0),
        post_process=groups.is_last_stage and stage in (None, stages - 1),
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_base,
        vp_stage=stage,
    )
    _tag_experts(chunk, config)
    rotary = chunk.rotary_pos_emb
    frequencies = rotary_frequencies(architecture.rope_base, head_dim(architecture), architecture.rope_scaling)
    rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    return chunk


def _tag_experts(chunk: GPTModel, config: TransformerConfig) -> None:
    """Mark the parameters whose gradients are summed over the ranks that hold the same experts.

    0.16 marks them only under expert parallelism. Whole experts on several tensor-parallel ranks, each of which sees
    its own part of the tokens, would then keep different gradients.
    """
    shared = config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name:
            parameter.allreduce = not shared


def _block_spec(config: TransformerConfig, implementation: str, layers: int) -> Any:
    if implementation == "transformer_engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
        )
    layer = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.self_attention.submodules.core_attention = EagerCoreAttention
    # by default the final norm is Apex's where that is installed, which knows no RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=WrappedTorchNorm)


def _in_precision(chunk: GPTModel, config: TransformerConfig) -> nn.Module:
    if config.bf16:
        return Float16Module(config, chunk)
    return chunk.to(config.params_dtype)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Megatron says of itself on every construction, and 0.19's note on GPTModel."""
    logger = logging.getLogger(GPTModel.__module__)
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            for message in _NOISE:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.setLevel(level)
