"""``megatron-support check``: one batch under many layouts, each compared with one process."""
