"""Numbers and words that fields of several parts of a recipe share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
DType = Literal["float32", "bfloat16"]
