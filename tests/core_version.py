"""Which Megatron-Core is installed: its releases write other files."""

import megatron.core
from packaging.version import Version

CORE = Version(megatron.core.__version__).release[:2]
