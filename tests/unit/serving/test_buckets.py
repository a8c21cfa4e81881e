from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.core.errors import ConfigError
from pilotage.serving import buckets


def test_defaults_are_powers_of_two_up_to_and_including_the_limit() -> None:
    assert buckets.token_buckets(2048) == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert buckets.token_buckets(300) == (16, 32, 64, 128, 256, 300)
    assert buckets.token_buckets(10) == (10,)
    assert buckets.seq_buckets(6) == (1, 2, 4, 6)
    assert buckets.seq_buckets(1) == (1,)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_pick_is_the_smallest_that_fits(limit: int, count: int) -> None:
    sizes = buckets.token_buckets(limit)
    if count > limit:
        with pytest.raises(ConfigError, match=f"{count} is over the largest bucket, {limit}"):
            buckets.pick(sizes, count, "num_batched_tokens_buckets")
    else:
        size = buckets.pick(sizes, count, "num_batched_tokens_buckets")
        assert size >= count
        assert all(other < count for other in sizes if other < size)


def test_a_bucket_above_the_limit_is_refused() -> None:
    assert buckets.fit("num_seqs_buckets", (1, 4), (1, 2, 4, 8), "max_num_seqs") == (1, 4)
    with pytest.raises(ConfigError, match="bucket 16 can never be used: max_num_seqs is 8"):
        buckets.fit("num_seqs_buckets", (1, 16), (1, 2, 4, 8), "max_num_seqs")
