from __future__ import annotations

import dataclasses

import pytest

from pilotage.core.config import TargetConfig
from pilotage.core.errors import ConfigError
from pilotage.model.neuron_config import NeuronConfig


def test_both_section_names_mean_the_same() -> None:
    values = {"num_seqs_buckets": [1, 4]}
    a = TargetConfig.from_additional_config({"pilotage": values})
    assert a == TargetConfig.from_additional_config({"neuron_config": values})
    assert a.num_seqs_buckets == (1, 4)
    assert TargetConfig.from_additional_config(None) == TargetConfig()
    assert NeuronConfig is TargetConfig
    with pytest.raises(ConfigError, match="both"):
        TargetConfig.from_additional_config({"pilotage": {}, "neuron_config": {}})


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"pilotage": {"num_seq_buckets": [1]}}, "num_seqs_buckets"),
        ({"pilotage": {"ep_degre": 1}}, "ep_degree"),
        ({"pilotge": {}}, '"pilotage"'),
        ({"num_seqs_buckets": [1]}, '{"pilotage": {"num_seqs_buckets": ...}}'),
    ],
)
def test_an_unknown_key_names_the_nearest(given: dict[str, object], near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TargetConfig.from_additional_config(given)
    assert near in str(caught.value)


@pytest.mark.parametrize("sizes", [[], [4, 1], [1, 1], [0, 1], [1.5], "12", [True], 4], ids=repr)
def test_malformed_buckets_are_refused(sizes: object) -> None:
    with pytest.raises(ConfigError, match="ascending order"):
        TargetConfig.from_dict({"num_seqs_buckets": sizes})


def test_lengths_that_a_graph_reaches_back() -> None:
    config = TargetConfig.from_dict(
        {"kv_segment_size_buckets": [512, 2048], "decode_context_length_buckets": [128, 384]}
    )
    assert (config.kv_segment_size_buckets, config.decode_context_length_buckets) == ((512, 2048), (128, 384))
    with pytest.raises(ConfigError, match=r"other sizes than \(512, 1024, 2048, 4096\)"):
        TargetConfig.from_dict({"kv_segment_size_buckets": [256, 512]})
    with pytest.raises(ConfigError, match="200 is no multiple of 128; use 256"):
        TargetConfig.from_dict({"decode_context_length_buckets": [128, 200]})
    with pytest.raises(ConfigError, match="ascending order"):
        TargetConfig.from_dict({"decode_context_length_buckets": [256, 128]})


def test_every_field_is_documented() -> None:
    for item in dataclasses.fields(TargetConfig):
        assert len(item.metadata["doc"]) > 20


def test_what_the_graph_samples() -> None:
    def stages(**values: object) -> object:
        return TargetConfig.from_dict({"on_device_sampling_config": values}).on_device_sampling_config

    assert stages() == {"temperature": True, "top_k": True, "top_p": True}
    assert stages(all_greedy=True) == {"temperature": False, "top_k": False, "top_p": False}
    assert stages(top_p=False) == {"temperature": True, "top_k": True, "top_p": False}
    with pytest.raises(ConfigError, match="exclude each other"):
        stages(all_greedy=True, top_k=True)
    with pytest.raises(ConfigError, match="without temperature"):
        stages(temperature=False)
    with pytest.raises(ConfigError, match=r'top_kk.*did you mean "top_k"'):
        stages(top_kk=True)
    with pytest.raises(ConfigError, match=r"temperature=0\.7 is neither true nor false"):
        stages(temperature=0.7)
