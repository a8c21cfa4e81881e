"""Process groups and collectives."""

from pilotage.parallel.group import TensorParallelGroup, get_tp_group, set_tp_group
from pilotage.parallel.sequence import enter, leave, rows_divided
from pilotage.parallel.sharding import divisors_text, heads_per_rank, kv_replicas, kv_shards, per_rank

__all__ = [
    "TensorParallelGroup",
    "divisors_text",
    "enter",
    "get_tp_group",
    "heads_per_rank",
    "kv_replicas",
    "kv_shards",
    "leave",
    "per_rank",
    "rows_divided",
    "set_tp_group",
]
