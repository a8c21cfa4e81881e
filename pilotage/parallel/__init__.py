"""Process groups and collectives."""

from pilotage.parallel.group import TensorParallelGroup, get_tp_group, set_tp_group
from pilotage.parallel.layout import (
    Component,
    ParallelLayout,
    get_component,
    get_parallel_layout,
    set_parallel_layout,
)
from pilotage.parallel.sequence import enter, leave, own_rows, rows_divided, shares_rows
from pilotage.parallel.sharding import divisors_text, heads_per_rank, kv_replicas, kv_shards, per_rank

__all__ = [
    "Component",
    "ParallelLayout",
    "TensorParallelGroup",
    "divisors_text",
    "enter",
    "get_component",
    "get_parallel_layout",
    "get_tp_group",
    "heads_per_rank",
    "kv_replicas",
    "kv_shards",
    "leave",
    "own_rows",
    "per_rank",
    "rows_divided",
    "set_parallel_layout",
    "set_tp_group",
    "shares_rows",
]
