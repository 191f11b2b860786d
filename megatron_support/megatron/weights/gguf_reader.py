"""The package gguf's reader, which alone takes any length that a file claims. Imported where a GGUF file is read."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

MAX_ARRAY = 2**22
"""Entries of one array of metadata, each of which becomes an object; vocabularies have up to 300,000."""


class BoundedReader(GGUFReader):
    """Refuses lengths, counts and offsets that lead outside the file before it works on what they claim.

    Raises:
        ValueError: naming claim, value and place.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        start, size = int(offset), int(count) * np.dtype(dtype).itemsize
        if start + size > len(self.data):
            raise ValueError(
                f"must end inside its {len(self.data)} bytes, claims {size} bytes at byte {start}; it is cut off"
            )
        return super()._get(start, dtype, int(count), override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            length = int(self._get(orig_offs + 4, "uint64")[0])  # behind the type of its entries
            if length > MAX_ARRAY:
                raise ValueError(f"an array must have at most {MAX_ARRAY} entries, claims {length} at byte {orig_offs}")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        for field in fields:
            offset = int(field.parts[-1][0])  # 64 bits without a sign, in which sums wrap around
            if offset > len(self.data):
                raise ValueError(f"tensor {field.name!r} must begin inside the file, claims byte {offset} of its data")
        super()._build_tensors(start_offs, fields)
