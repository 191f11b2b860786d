"""What Megatron-Core uses on this machine, for ``megatron-support doctor``."""

from __future__ import annotations

from dataclasses import dataclass

import megatron.core.optimizer

from megatron_support.megatron.host import Host
from megatron_support.megatron.model import resolve_implementation


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The implementations that a recipe with ``auto`` settings gets on a host."""

    layers: str
    attention: str
    optimizer: str


def backends_in_use(host: Host) -> Backends:
    """Look at what Megatron-Core found when it was imported."""
    fused = resolve_implementation("auto", host.device) == "transformer_engine"
    # Megatron tries Transformer Engine, then Apex, then torch
    adam = megatron.core.optimizer.Adam
    origin = {"transformer_engine": "Transformer Engine FusedAdam", "apex": "Apex FusedAdam"}
    return Backends(
        layers="Transformer Engine" if fused else "Megatron-Core local",
        attention="Transformer Engine" if fused else "torch scaled_dot_product_attention",
        optimizer=origin.get(adam.__module__.partition(".")[0], "torch AdamW"),
    )
