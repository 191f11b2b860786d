"""Host frameworks: Megatron-LM, verl, NeMo-RL, slime. One module per host, and the registry that hooks them.

Importing this package imports no host, no torch and no Megatron-Core.
"""

from megatron_support.adapters.hooks import HostReport
from megatron_support.adapters.registry import HOSTS, Report, register, unregister

__all__ = ["HOSTS", "HostReport", "Report", "register", "unregister"]
