"""One self-contained HTML page about a run, or about a rollout file before training."""

from megatron_support.training.report.rollout_page import rollout_page
from megatron_support.training.report.run_page import run_page

__all__ = ["rollout_page", "run_page"]
