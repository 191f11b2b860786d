"""Registers on import, for hosts that take the name of a module and nothing else.

``MEGATRON_SUPPORT_HOSTS`` names the hosts (comma separated, each then must be there). Without it, the hosts whose
package this process has imported already are registered, so that importing this never imports a framework.
"""

from __future__ import annotations

import os
import sys

from megatron_support.adapters.registry import HOSTS, register

_PACKAGES = {"megatron_lm": "megatron.training", "verl": "verl", "nemo_rl": "nemo_rl", "slime": "slime"}

_named = [name.strip() for name in os.environ.get("MEGATRON_SUPPORT_HOSTS", "").split(",") if name.strip()]
reports = [register(name) for name in _named or [host for host in HOSTS if _PACKAGES[host] in sys.modules]]
