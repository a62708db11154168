"""Exact attention over the ranks of ``torch.distributed``; see ``docs/distributed.md``."""

from fastattn.distributed.attention import attention
from fastattn.distributed.decode import decode_attention
from fastattn.distributed.layout import Layout
from fastattn.distributed.memory import hopfield_retrieve, memory_hop_attention
from fastattn.distributed.plan import Plan, Share, plan

__all__ = [
    "Layout",
    "Plan",
    "Share",
    "attention",
    "decode_attention",
    "hopfield_retrieve",
    "memory_hop_attention",
    "plan",
]
