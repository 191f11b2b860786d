"""Megatron-Core is imported once, here, before any test forks ranks: a forked rank then starts in no time."""

import megatron_support.megatron  # noqa: I001  (prepares the import of megatron.core)
import megatron.core  # noqa: F401
import megatron_support.megatron.model  # noqa: F401
