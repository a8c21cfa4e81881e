"""Process groups and collectives."""

from pilotage.parallel.group import TensorParallelGroup, get_tp_group, set_tp_group
from pilotage.parallel.sharding import divisors_text, heads_per_rank, kv_replicas, kv_shards, per_rank

__all__ = [
    "TensorParallelGroup",
    "divisors_text",
    "get_tp_group",
    "heads_per_rank",
    "kv_replicas",
    "kv_shards",
    "per_rank",
    "set_tp_group",
]
