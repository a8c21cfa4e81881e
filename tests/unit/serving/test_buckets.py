from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.core.config import TargetConfig
from pilotage.core.errors import ConfigError
from pilotage.serving import buckets
from pilotage.serving.buckets import Key, Reach


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


def test_graphs_by_how_far_they_look_back() -> None:
    reach = Reach(contexts=(128, 384), segments=(512, 1024))
    assert [key.name for key in reach.keys("decode", 4)] == ["decode-4-context128", "decode-4-context384", "decode-4"]
    assert [key.name for key in reach.keys("prefill", 64)] == [
        "prefill-64-fresh",
        "prefill-64-context512-segment512",
        "prefill-64-segment1024",
    ]
    assert [key.name for key in Reach().keys("prefill", 64)] == ["prefill-64"]
    assert [key.name for key in Reach().keys("decode", 1)] == ["decode-1"]


@given(
    st.sets(st.integers(1, 20), max_size=4),
    st.sets(st.sampled_from([512, 1024, 2048, 4096]), max_size=3),
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 5000),
    st.integers(1, 64),
)
def test_the_picked_graph_holds_every_request_and_reads_least(
    contexts: set[int], segments: set[int], kind: buckets.Kind, cached: int, new: int
) -> None:
    reach = Reach(tuple(sorted(128 * n for n in contexts)), tuple(sorted(segments)))
    longest = cached + new
    keys = reach.keys(kind, 64)
    picked = reach.pick(kind, 64, cached=cached, longest=longest)
    assert picked in keys
    assert not (picked.fresh and cached)
    assert picked.context == 0 or longest <= picked.context
    for key in keys[: keys.index(picked)]:  # those that read less do not hold it
        assert (key.fresh and cached > 0) or (not key.fresh and longest > key.context)


def test_lengths_that_no_graph_needs_are_refused() -> None:
    def reach(block_size: int = 32, max_model_len: int = 1024, **values: object) -> Reach:
        return Reach.of(TargetConfig.from_dict(values), max_model_len, block_size)

    assert reach(decode_context_length_buckets=[128, 896], kv_segment_size_buckets=[512]) == Reach((128, 896), (512,))
    with pytest.raises(ConfigError, match="decode_context_length_buckets: 1024 is not below max_model_len, 1024"):
        reach(decode_context_length_buckets=[128, 1024])
    with pytest.raises(ConfigError, match="kv_segment_size_buckets: 2048 is not below"):
        reach(kv_segment_size_buckets=[512, 2048])
    with pytest.raises(ConfigError, match="no whole number of pages of 48"):
        reach(kv_segment_size_buckets=[512], block_size=48)
    assert Key("decode", 8, 256).name == "decode-8-context256"
