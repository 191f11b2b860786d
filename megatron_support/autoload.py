"""Registers on import, for hosts that take the name of a module and nothing else.

``MEGATRON_SUPPORT_HOSTS`` names the hosts (comma separated); each must then be there. Without it, the hosts whose
package this process has imported already are registered, so that importing this never imports a framework that nobody
asked for.
"""

from __future__ import annotations

import logging
import os
import sys

from megatron_support.adapters.registry import HOSTS, PACKAGES, register

named = [name.strip() for name in os.environ.get("MEGATRON_SUPPORT_HOSTS", "").split(",") if name.strip()]
try:
    reports = [register(name) for name in named or [host for host in HOSTS if PACKAGES[host] in sys.modules]]
except Exception:  # whatever a host's import raises: hosts that load plugins may swallow it
    logging.getLogger(__name__).exception("megatron_support.autoload could not register")
    raise
