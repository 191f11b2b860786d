"""Parts of ``scripts/bench_support.py``."""
