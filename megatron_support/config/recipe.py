"""The recipe: everything one run needs, as one frozen tree. Fields are documented in place."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator
from typing_extensions import Self

from megatron_support.config.actor_step import (
    ActorStepConfig,
    LogprobConfig,
    MicrobatchConfig,
    OnFault,
    SequenceFilterConfig,
)
from megatron_support.config.advantages import Advantages, GRPOConfig
from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import NonNegativeInt, PositiveFloat, PositiveInt
from megatron_support.config.loss import ActorLossConfig
from megatron_support.config.model import (
    Architecture,
    GGUFWeights,
    HuggingFaceWeights,
    MegatronWeights,
    MixtureOfExperts,
    ModelConfig,
    RandomWeights,
    Weights,
)
from megatron_support.config.optimizer import OptimizerSettings, ScheduleConfig
from megatron_support.config.parallel import FullRecompute, ParallelConfig, Recompute, SelectiveRecompute
from megatron_support.config.path_text import PathText
from megatron_support.config.rollouts import (
    FileRollouts,
    RolloutFormat,
    Rollouts,
    SamplerRollouts,
    SamplingConfig,
    TaskCheck,
)

__all__ = [
    "ActorStepConfig",
    "Architecture",
    "CheckpointConfig",
    "FileRollouts",
    "FullRecompute",
    "GGUFWeights",
    "HuggingFaceWeights",
    "LoggingConfig",
    "LogprobConfig",
    "MegatronWeights",
    "MicrobatchConfig",
    "MixtureOfExperts",
    "ModelConfig",
    "OnFault",
    "OptimizerSettings",
    "ParallelConfig",
    "ProfileConfig",
    "RandomWeights",
    "Recipe",
    "Recompute",
    "ReferenceConfig",
    "RolloutFormat",
    "Rollouts",
    "SamplerRollouts",
    "SamplingConfig",
    "ScheduleConfig",
    "SelectiveRecompute",
    "SequenceFilterConfig",
    "TaskCheck",
    "TeacherConfig",
    "TrainConfig",
    "WandbConfig",
    "Weights",
]


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
