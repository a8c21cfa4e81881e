"""How counts divide over ranks; every refusal names the sizes that work."""

from __future__ import annotations

from pilotage.core.errors import Unsupported


def divisors_text(count: int, limit: int = 64) -> str:
    """List the divisors of `count` up to `limit` for an error message: "1, 2 or 4"."""
    found = [str(n) for n in range(1, min(count, limit) + 1) if count % n == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"


def per_rank(count: int, world_size: int, what: str) -> int:
    """Divide `count` over the ranks.

    Args:
        count: things to divide.
        world_size: ranks.
        what: the config key or module that holds the count, for the error.

    Raises:
        Unsupported: it does not divide; the message names the sizes that do.
    """
    if count % world_size:
        raise Unsupported(
            f"{count} does not divide over tensor_parallel_size={world_size}",
            where=what,
            do=f"use {divisors_text(count)}",
        )
    return count // world_size


def heads_per_rank(num_heads: int, num_kv_heads: int, world_size: int) -> tuple[int, int]:
    """Divide attention heads over ranks: (query heads, key/value heads) on each.

    With more ranks than key/value heads each of those is held by several ranks.

    Raises:
        Unsupported: a count does not divide; the message names the sizes that work for both.
    """
    works = [
        n for n in range(1, num_heads + 1) if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    if world_size not in works:
        raise Unsupported(
            f"{num_heads} query and {num_kv_heads} key/value heads do not divide over "
            f"tensor_parallel_size={world_size}",
            where="num_attention_heads, num_key_value_heads",
            do=f"use {', '.join(map(str, works))}",
        )
    return num_heads // world_size, max(1, num_kv_heads // world_size)


def kv_shards(num_kv_heads: int, world_size: int) -> int:
    """Count the distinct key/value shards: ranks, or heads where there are more ranks than heads."""
    return min(num_kv_heads, world_size)


def kv_replicas(num_kv_heads: int, world_size: int) -> int:
    """Count the ranks that hold each key/value shard; consecutive ranks share one."""
    return max(1, world_size // num_kv_heads)
