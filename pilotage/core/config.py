"""`TargetConfig`: what a user may set for this target, under `additional_config={"pilotage": {...}}` of vLLM.

The field names are those of the vLLM Neuron documentation, and `"neuron_config"` is read as the same key, so that a
command line written for that plugin keeps its meaning here or is refused, never half obeyed.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotage.core.errors import ConfigError

SECTIONS = ("pilotage", "neuron_config")
SAMPLING_PARAMETERS = ("temperature", "top_k", "top_p")
SEGMENT_SIZES = (512, 1024, 2048, 4096)
CONTEXT_STEP = 128
# The settings that are bucket sizes, with an example of each.
_BUCKETS = {
    "num_batched_tokens_buckets": [16, 64, 256],
    "num_seqs_buckets": [1, 4, 16],
    "kv_segment_size_buckets": [512, 2048],
    "decode_context_length_buckets": [256, 1024],
}


def _setting(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Settings of the target; the table in docs/configuration.md is generated from this class."""

    num_batched_tokens_buckets: tuple[int, ...] | None = _setting(
        None,
        "Prefill graphs, by number of packed tokens; ascending. None: powers of two from 16 to "
        "`max_num_batched_tokens`, and that number itself. A smaller largest bucket lowers `max_num_batched_tokens` "
        "to it.",
    )
    num_seqs_buckets: tuple[int, ...] | None = _setting(
        None,
        "Decode graphs, by number of requests; ascending. None: powers of two from 1 to `max_num_seqs`, and that "
        "number itself. A smaller largest bucket lowers `max_num_seqs` to it.",
    )
    max_prefill_seqs: int = _setting(
        8,
        "Rows of the block table in every prefill graph: up to this many requests share one prefill forward; more are "
        "run in several.",
    )
    kv_segment_size_buckets: tuple[int, ...] | None = _setting(
        None,
        "Prefill graphs that read cached keys in segments of these sizes: of 512, 1024, 2048 and 4096, ascending, each "
        "a multiple of `block_size` and below `max_model_len`. A batch with nothing cached runs in graphs that read no "
        "cache; one in which every request fits into a segment, in the graphs of the smallest such segment; any other "
        "goes through segments of the largest size. None: one graph reads the whole prefix at once.",
    )
    decode_context_length_buckets: tuple[int, ...] | None = _setting(
        None,
        "Decode graphs by context length: multiples of 128 below `max_model_len`, ascending; `max_model_len` itself is "
        "added. A batch runs in the graphs of the shortest length that holds its longest request. None: one graph "
        "serves every length.",
    )
    attention_dp_size: int = _setting(
        1,
        "Replicas of the attention layers among the tensor-parallel ranks: fewer ranks divide the heads, and each "
        "replica attends from its share of the tokens. Every replica caches all keys and values. See docs/parallel.md.",
    )
    mlp_dp_size: int = _setting(1, "Replicas of the MLPs and experts; each does its share of the tokens.")
    embedding_dp_size: int = _setting(1, "Replicas of the embedding.")
    lm_head_dp_size: int = _setting(1, "Replicas of the LM head.")
    ep_degree: int | None = _setting(
        None,
        "Groups of ranks over which the experts of a layer are dealt out; the ranks of a group divide each expert. "
        "Above 1 it needs vLLM's `enable_expert_parallel`. None: all ranks of a replica of the MLPs with that, else 1.",
    )
    on_device_sampling_config: Mapping[str, Any] | None = _setting(
        None,
        'Sampling inside the graph: `{"temperature": BOOL, "top_k": BOOL, "top_p": BOOL}` says which parameters of a '
        'request the graph applies (default: all of them), `{"all_greedy": true}` that it only takes the most likely '
        "token. A request that needs anything else is sampled by vLLM's sampler. None: all requests are. "
        "See docs/sampling.md.",
    )
    tensor_replacement: Mapping[str, Any] | None = _setting(
        None,
        'Reference tensors handed onward inside the graph: `{"tensors_path": FILE or capture directory, '
        '"prompt_token_ids_path": FILE, "sites": [patterns]}`, or a `TensorReplacementConfig`. '
        "`reference_captures_path` is another name of `tensors_path`; without it, `sites` can be replaced later. "
        "See docs/capture.md.",
    )
    tensor_capture: Mapping[str, Any] | None = _setting(
        None,
        'Tensors recorded inside the graph: `{"sites": [patterns], "path": DIRECTORY}`; without `path`, recording '
        "starts with `capture_start`. See docs/capture.md.",
    )

    lazy_compile: bool = _setting(
        False,
        "Compile a graph when a batch first needs it, not at the start: for debugging, where few graphs are needed.",
    )
    unscaled_fp8_kv_cache: bool = _setting(
        False,
        "With `kv_cache_dtype=fp8`, store keys and values with scale 1.0 where the checkpoint has no `k_scale` and "
        "`v_scale`; without this such a checkpoint is refused. See docs/kv-cache.md.",
    )
    screen_lm_head: bool | None = _setting(
        None,
        "Keep an 8-bit copy of the LM head, half its size, and let steps in which every request wants nothing but the "
        "most likely token compute only the logits that the copy cannot rule out: the same tokens for about half the "
        "time of the head. None: where it pays and can be done, which is a bf16 head of at least 32,768 tokens on one "
        "rank, with the compiled CPU kernels and without a cap on the logits. See docs/serving.md.",
    )
    exact_taps: bool = _setting(
        False,
        "Compile so that taps change nothing, bit for bit, also in bf16: every operator rounds as it does without a "
        "compiler, and no addition is folded into a product. Slower; for debugging.",
    )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: str = "additional_config.pilotage") -> TargetConfig:
        """Build the configuration from plain JSON values.

        Args:
            values: keys and values as the user wrote them.
            where: place of `values`, for the error message.

        Raises:
            ConfigError: a key is unknown (the nearest known one is named) or a value has the wrong type.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"expected an object with keys, got {type(values).__name__}", where=where)
        known = {item.name: item for item in dataclasses.fields(cls)}
        parsed: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                raise _unknown_key(key, known, where)
            if isinstance(value, list):
                value = tuple(value)
            parsed[key] = value
        for key in _BUCKETS:
            if parsed.get(key) is not None:
                _check_buckets(key, parsed[key], where)
        rows = parsed.get("max_prefill_seqs", known["max_prefill_seqs"].default)
        if not _is_positive_int(rows):
            raise ConfigError(f"max_prefill_seqs={rows!r} is not a positive integer", where=where)
        for key in (*_COMPONENT_SIZES, "ep_degree"):
            size = parsed.get(key, 1)
            if not _is_positive_int(size) and not (key == "ep_degree" and size is None):
                raise ConfigError(f"{key}={size!r} is not a positive integer", where=where)
        for key in ("lazy_compile", "unscaled_fp8_kv_cache", "exact_taps", "screen_lm_head"):
            default = known[key].default
            if not isinstance(parsed.get(key, default), bool) and parsed.get(key, default) is not default:
                raise ConfigError(f"{key}={parsed[key]!r} is neither true nor false", where=where)
        if parsed.get("on_device_sampling_config") is not None:
            parsed["on_device_sampling_config"] = _sampling(parsed["on_device_sampling_config"], where)
        for key, names in _SECTION_KEYS.items():
            if parsed.get(key) is not None:
                parsed[key] = _section(key, parsed[key], names, where)
        return cls(**parsed)

    @classmethod
    def from_additional_config(cls, additional_config: Mapping[str, Any] | None) -> TargetConfig:
        """Read the section `"pilotage"` (or `"neuron_config"`) of vLLM's `additional_config`.

        Raises:
            ConfigError: both sections are given, a section is unknown, or its content is wrong.
        """
        values = dict(additional_config or {})
        given = [name for name in SECTIONS if name in values]
        if len(given) == 2:
            raise ConfigError('both "pilotage" and "neuron_config" are given', where="additional_config", do="keep one")
        unknown = [name for name in values if name not in SECTIONS]
        if unknown:
            raise _unknown_key(unknown[0], {**dict.fromkeys(SECTIONS), **_field_names(cls)}, "additional_config")
        return cls.from_dict(values[given[0]], where=f"additional_config.{given[0]}") if given else cls()


def _field_names(cls: type[TargetConfig]) -> dict[str, None]:
    return dict.fromkeys(item.name for item in dataclasses.fields(cls))


def _unknown_key(key: str, known: Mapping[str, Any], where: str) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
    do = f'did you mean "{near}"?'
    if where == "additional_config" and near not in SECTIONS:
        do = f'settings go under "pilotage": {{"pilotage": {{"{near}": ...}}}}'
    return ConfigError(f'unknown key "{key}"', where=where, do=do)


def _section(key: str, value: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """Check the keys and types of a setting that is an object itself."""
    where = f"{where}.{key}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected an object with keys, got {type(value).__name__}", where=where)
    for name, item in value.items():
        if name not in known:
            raise _unknown_key(name, dict.fromkeys(known), where)
        if name != "sites" and not isinstance(item, str):
            raise ConfigError(f"{name}={item!r} is not a path", where=where)
    found = dict(value)
    if "sites" in found:
        patterns = found["sites"]
        if not isinstance(patterns, list | tuple) or not patterns or not all(isinstance(x, str) for x in patterns):
            raise ConfigError(f"sites={patterns!r} is no list of patterns", where=where, do='write ["model.layers.*"]')
        found["sites"] = list(patterns)
    elif key == "tensor_capture" or not found.keys() & {"tensors_path", "reference_captures_path"}:
        raise ConfigError("sites is missing", where=where, do='write for instance sites=["model.layers.*"]')
    if "tensors_path" in found and found.get("reference_captures_path", found["tensors_path"]) != found["tensors_path"]:
        raise ConfigError("tensors_path and reference_captures_path name two files", where=where, do="keep one")
    if "reference_captures_path" in found:
        found["tensors_path"] = found.pop("reference_captures_path")
    return found


def _sampling(value: Any, where: str) -> dict[str, bool]:
    """Check which parameters of a request the graph shall apply; returns one value each of `SAMPLING_PARAMETERS`."""
    where = f"{where}.on_device_sampling_config"
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected an object with keys, got {type(value).__name__}", where=where)
    known = ("all_greedy", *SAMPLING_PARAMETERS)
    for name, item in value.items():
        if name not in known:
            raise _unknown_key(name, dict.fromkeys(known), where)
        if not isinstance(item, bool):
            raise ConfigError(
                f"{name}={item!r} is neither true nor false",
                where=where,
                do="the values are each request's own; this says which of them the graph applies",
            )
    greedy = value.get("all_greedy", False)
    chosen = {name: bool(value.get(name, not greedy)) for name in SAMPLING_PARAMETERS}
    if greedy and any(chosen.values()):
        raise ConfigError(
            f"all_greedy and {next(name for name in chosen if chosen[name])} exclude each other", where=where
        )
    if not chosen["temperature"] and any(chosen.values()):
        raise ConfigError("top_k and top_p are of no use without temperature", where=where)
    return chosen


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_buckets(key: str, sizes: Any, where: str) -> None:
    good = isinstance(sizes, tuple) and sizes and all(_is_positive_int(size) for size in sizes)
    if not good or list(sizes) != sorted(set(sizes)):
        shown = list(sizes) if isinstance(sizes, tuple) else sizes
        raise ConfigError(
            f"{key}={shown!r} is not a list of positive integers in ascending order",
            where=where,
            do=f"write for instance {key}={_BUCKETS[key]}",
        )
    if key == "kv_segment_size_buckets" and not set(sizes) <= set(SEGMENT_SIZES):
        raise ConfigError(f"{key}={list(sizes)} has other sizes than {SEGMENT_SIZES}", where=where)
    wrong = [size for size in sizes if size % CONTEXT_STEP]
    if key == "decode_context_length_buckets" and wrong:
        raise ConfigError(
            f"{key}: {wrong[0]} is no multiple of {CONTEXT_STEP}",
            where=where,
            do=f"use {-(-wrong[0] // CONTEXT_STEP) * CONTEXT_STEP}",
        )


_COMPONENT_SIZES = ("attention_dp_size", "mlp_dp_size", "embedding_dp_size", "lm_head_dp_size")
_SECTION_KEYS = {
    "tensor_capture": ("sites", "path"),
    "tensor_replacement": ("tensors_path", "reference_captures_path", "prompt_token_ids_path", "sites"),
}
NeuronConfig = TargetConfig
