"""Where rollouts come from: files, or the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from megatron_support.config.base import StrictModel
from megatron_support.config.bounds import PositiveFloat, PositiveInt
from megatron_support.config.path_text import PathText


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
    """JSONL or Parquet files, or dumps of other programs, relative to the recipe's folder (on the command line, to the
    working directory); read in order."""
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
