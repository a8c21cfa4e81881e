"""Replacement under the real engine: reference rows go onward where they belong, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import generate, prompts_of, tokens_of
from safetensors import safe_open

import pilotage.functional as NF
from pilotage.accuracy.arms.module import OurModules
from pilotage.accuracy.tensor_replacement import TensorReplacer, get_replacement_tensor, set_active_context
from pilotage.core.errors import ConfigError
from pilotage.model.neuron_config import TensorReplacementConfig
from pilotage.models.common.paging import PagedSession
from pilotage.probe import Captures, CaptureWriter, Taps
from pilotage.serving import launch

pytestmark = pytest.mark.engine

CONFIG = {"num_batched_tokens_buckets": [16, 64], "num_seqs_buckets": [1, 4]}
NEW = 6
LENGTHS = (3, 20, 33, 70)


def model_of(path: Path) -> Any:
    return OurModules(path, torch.float32, 128).model


def rows_of(model: Any, streams: Sequence[Sequence[int]], sites: Sequence[str]) -> list[dict[str, torch.Tensor]]:
    taps = Taps(model, capture=sites, num_tokens=128, num_sampled=128)
    found = []
    for stream in streams:
        session = PagedSession(model=model, num_requests=1, max_tokens=128, block_size=16)
        with taps.active(len(stream), len(stream)):
            session.step({0: stream})
        found.append({name: taps.rows(name, len(stream), len(stream)).clone() for name in taps.capture})
    return found


def write(directory: Path, prompts: Sequence[list[int]], rows: Sequence[dict[str, torch.Tensor]]) -> str:
    with CaptureWriter(directory, arm="reference") as writer:
        for number, (prompt, values) in enumerate(zip(prompts, rows, strict=True)):
            writer.request(str(number), prompt)
            count = len(next(iter(values.values())))
            writer.add(values, requests=[str(number)] * count, positions=range(count), tokens=[0] * count)
    return str(directory)


def forced(llm: Any, streams: Sequence[list[int]], prompts: Sequence[list[int]], **extra: Any) -> None:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=len(stream) - len(prompt) + 1,
            ignore_eos=True,
            extra_args={"pilotage_force": [*stream[len(prompt) :], 9], **extra},
        )
        for stream, prompt in zip(streams, prompts, strict=True)
    ]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def recorded(llm: Any, directory: Path, run: Callable[[], object]) -> dict[tuple[int, int], torch.Tensor]:
    """Raw logits of a run by (number of the request in order of arrival, position)."""
    llm.collective_rpc("record_start", args=(str(directory),))
    run()
    found = {}
    for name in llm.collective_rpc("record_stop")[0]:
        with safe_open(name, framework="pt") as file:
            logits = file.get_tensor("logits")
            index = zip(file.get_tensor("request").tolist(), file.get_tensor("position").tolist(), strict=True)
            found.update(zip(index, logits, strict=True))
    return found


@pytest.fixture(scope="module", params=["llama3", "gemma3"])
def served(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[tuple[Path, Path, Any]]:
    path, other = tiny(request.param), tiny(request.param, seed=3)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        additional_config=CONFIG,
    ) as llm:
        yield path, other, llm


def test_rows_of_another_model_go_onward_where_they_have_a_reference(
    served: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    """What leaves the final norm is another model's: the logits are this model's head on those rows.

    Four prompts have a reference, the second only to its position 15; a fifth has none.
    """
    path, other, llm = served
    prompts = prompts_of((*LENGTHS, 40), seed=1)
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([NEW] * 5, seed=2), strict=True)]
    known, strange = streams[:4], streams[4]
    ours, theirs = model_of(path), model_of(other)
    reference = rows_of(theirs, known, ["model.norm"])
    reference[1] = {name: rows[:16] for name, rows in reference[1].items()}
    plain = recorded(llm, tmp_path / "plain", lambda: forced(llm, streams, prompts))
    source = write(tmp_path / "reference", prompts[:4], reference)
    assert llm.collective_rpc("replace_start", args=(source,)) == [["model.norm"]]
    live = tmp_path / "live"
    llm.collective_rpc("capture_start", args=(str(live), ["model.norm"]))
    replaced = recorded(llm, tmp_path / "replaced", lambda: forced(llm, streams, prompts))
    llm.collective_rpc("capture_stop")
    (receipt,) = llm.collective_rpc("replace_stop")
    for number, stream in enumerate(streams):
        for position in range(len(stream)):
            rows = reference[number]["model.norm"] if number < 4 else torch.empty(0)
            found = replaced[number, position]
            if position < len(rows):
                expected = ours.compute_logits(rows[position : position + 1])[0]
                assert (found - expected).abs().max() < 1e-4, (number, position)
                assert (found - plain[number, position]).abs().max() > 1e-2
            else:
                assert torch.equal(found, plain[number, position]), (number, position)
    total = sum(len(stream) for stream in known)
    missed = len(known[1]) - 16
    assert receipt["requests"] == {"known": 4, "unknown": 1}
    assert receipt["sites"] == ["model.norm"] and receipt["zeroed"] == [] and not receipt["whole"]
    counted = {name: receipt["rows"][name] for name in ("replaced", "missed", "live")}
    assert counted == {"replaced": total - missed, "missed": missed, "live": len(strange)}
    # What was recorded is the live value, before it was replaced.
    captures = Captures.open(live)
    assert captures.notes["replacement"]["rows"]["replaced"] == total - missed
    for prompt, stream, mine in zip(prompts, streams, rows_of(ours, streams, ["model.norm"]), strict=True):
        positions, rows = captures.get(captures.find(prompt)[0], "model.norm")
        assert positions.tolist() == list(range(len(stream)))
        assert (rows - mine["model.norm"]).abs().max() < 1e-4
    again = recorded(llm, tmp_path / "again", lambda: forced(llm, streams, prompts))
    assert again.keys() == plain.keys() and all(torch.equal(again[key], plain[key]) for key in plain), "live again"


def test_every_site_at_once_and_single_sites_restored(served: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """Each site hands its own reference onward, so its live value shows what the one step before it computes."""
    path, other, llm = served
    prompts = prompts_of(LENGTHS, seed=4)
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([NEW] * 4, seed=5), strict=True)]
    theirs = model_of(other)
    sites = ["model.embed_tokens", "**.input_layernorm", "**.q", "**.k", "**.v", "**.q_rope", "**.k_rope", "**.heads"]
    sites += ["**.self_attn", "**.mid", "**.mlp", "model.layers.*", "model.norm"]
    reference = rows_of(theirs, streams, sites)
    source = write(tmp_path / "reference", prompts, reference)
    llm.collective_rpc("replace_start", args=(source, None, None, False))
    llm.collective_rpc("capture_start", args=(str(tmp_path / "live"), sites, False))
    forced(llm, streams, prompts)
    llm.collective_rpc("capture_stop")
    captures = Captures.open(tmp_path / "live")
    # Rotation and attention have no weights: fed with the other model's rows, they give the other model's rows.
    for prompt, want in zip(prompts, reference, strict=True):
        (request,) = captures.find(prompt)
        for site in captures.sites:
            positions, rows = captures.get(request, site)
            difference = float((rows - want[site][positions]).abs().max())
            if site.endswith((".q_rope", ".k_rope", ".heads")) and "llama" in str(path):
                assert difference < 1e-4, site
            if site.endswith((".q", ".mlp", ".self_attn")):
                assert difference > 1e-3, site
    # One site alone, with the same graphs: only what is after it changes.
    (names,) = llm.collective_rpc("replace_sites", args=(["model.layers.1"],))
    assert names == ["model.layers.1"]
    llm.collective_rpc("capture_start", args=(str(tmp_path / "one"), ["model.layers.*"], False))
    forced(llm, streams, prompts)
    llm.collective_rpc("capture_stop")
    llm.collective_rpc("replace_stop")
    one = Captures.open(tmp_path / "one")
    mine = rows_of(model_of(path), streams, ["model.layers.*"])
    for prompt, own, want in zip(prompts, mine, reference, strict=True):
        (request,) = one.find(prompt)
        for layer, changed in (("model.layers.0", False), ("model.layers.1", False), ("model.layers.2", True)):
            difference = float((one.get(request, layer)[1] - own[layer]).abs().max())
            assert (difference > 1e-3) == changed, (layer, difference)
        assert (one.get(request, "model.layers.1")[1] - want["model.layers.1"]).abs().max() > 1e-3, "recorded live"


def test_a_key_that_the_model_does_not_have_is_an_error(served: tuple[Path, Path, Any], tmp_path: Path) -> None:
    _, _, llm = served
    source = write(tmp_path / "r", [[1, 2]], [{"model.layers.0.mlp.router": torch.ones(2, 4)}])
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.router.*matches no site"):
        llm.collective_rpc("replace_start", args=(source,))


def test_compiled_offline_with_captures_in_memory(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The document's offline form, under the name of its section; one prompt is the beginning of the other."""
    from torch._dynamo.utils import counters
    from vllm import SamplingParams

    path, other = tiny("llama3", num_hidden_layers=2), tiny("llama3", seed=3, num_hidden_layers=2)
    ours, theirs = model_of(path), model_of(other)
    long = prompts_of([30], seed=6)[0]
    prompts = [long[:20], long]
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([NEW, NEW], seed=7), strict=True)]
    streams[0][20:23] = long[20:23]
    values = rows_of(theirs, streams, ["model.norm"])
    captures = []
    for prompt, rows in zip(prompts, values, strict=True):
        value = rows["model.norm"]
        whole = [value[None, : len(prompt)]]
        whole += [value[None, : end + 1] for end in range(len(prompt), len(value))]
        captures.append({"model.norm": whole})
    section = {
        "num_batched_tokens_buckets": [48],
        "num_seqs_buckets": [4],
        "tensor_capture": {"sites": ["model.layers.*", "**.heads", "model.norm"], "path": str(tmp_path)},
        "tensor_replacement": TensorReplacementConfig(tensors=captures, prompt_token_ids=prompts),
    }
    expected = [
        [int(ours.compute_logits(rows["model.norm"][p : p + 1]).argmax()) for p in range(len(rows["model.norm"]))]
        for rows in values
    ]
    with launch.engine(
        path, dtype="float32", max_model_len=128, max_num_seqs=4, block_size=16, additional_config=section
    ) as llm:
        traced = dict(counters["stats"])
        # Prompted again with forced tokens: position p of the reference decides token p + 1, wherever prefill ends.
        for again in (False, True):  # then the pages of the first time are found: they hold the same reference's keys
            for cut in (0, 2):
                given = [stream[: len(prompt) + cut] for stream, prompt in zip(streams, prompts, strict=True)]
                params = [
                    SamplingParams(temperature=0.0, max_tokens=1, extra_args={"pilotage_prompt": number})
                    for number in range(2)
                ]
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
                assert not again or all(output.num_cached_tokens >= 16 for output in outputs)
                for number, (ids, token) in enumerate(zip(given, tokens_of(outputs), strict=True)):
                    assert token == [expected[number][len(ids) - 1]], (number, cut)
        # An unnamed prompt that completes the longer one is taken for it, as documented.
        strange = generate(llm, prompts_of([25], seed=8), 4)
        assert dict(counters["stats"]) == traced, "something was traced while serving"
        (receipt,) = llm.collective_rpc("receipt")
        (summary,) = llm.collective_rpc("capture_stop")
    assert receipt["replacement"]["requests"] == {"known": 8, "unknown": 1}
    assert tokens_of(strange)[0]
    assert summary["observer"] == receipt["observer"] and summary["observer"]["prefill"]["relative_rms"] < 1e-5
    # Recorded at the same time: this model's own values, up to the place that is replaced.
    recorded_rows = Captures.open(tmp_path)
    for number, (stream, prompt) in enumerate(zip(streams, prompts, strict=True)):
        own = rows_of(ours, [stream], list(recorded_rows.sites))[0]
        request = recorded_rows.find(prompt)[0]
        for site, want in own.items():
            positions, rows = recorded_rows.get(request, site)
            assert positions.tolist() == list(range(len(prompt))), (number, site)
            assert (rows - want[: len(prompt)]).abs().max() < 2e-4, (number, site)


def test_a_name_that_the_model_only_asks_for(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document's first pattern on its own model: router logits without a live value, zero without a reference."""
    from pilotage.models.gpt_oss import model as gpt_oss

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        logits = get_replacement_tensor(f"{self.name}.router")
        if logits is None:
            logits = self.router(x)
        return self.experts(x, NF.expert_affinities(logits, top_k=self.top_k, rule="topk_softmax"))

    monkeypatch.setattr(gpt_oss.GptOssMLP, "forward", forward)
    path = tiny("gpt_oss")
    prompts = prompts_of((5, 30), seed=11)
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([NEW, NEW], seed=12), strict=True)]
    model = model_of(path)
    names = [f"model.layers.{index}.mlp.router" for index in range(len(model.model.layers))]
    routed = [{name: torch.randn(len(stream), model.config.num_experts) * 4 for name in names} for stream in streams]
    captures = [{name: [value[None]] for name, value in rows.items()} for rows in routed]
    with pytest.warns(UserWarning, match="step 0 has"):
        replacer = TensorReplacer(captures, prompt_token_ids=prompts)
    expected = []
    for number, stream in enumerate(streams):
        replacer.register_request("r", prompts[number])
        set_active_context(replacer.build_context(["r"], range(len(stream)), True))
        session = PagedSession(model=model, num_requests=1, max_tokens=128, block_size=16)
        expected.append(session.step({0: stream})[0])
        set_active_context(None)
    source = write(tmp_path / "reference", prompts, routed)
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        additional_config=CONFIG,
    ) as llm:
        (sites,) = llm.collective_rpc("replace_start", args=(source,))
        found = recorded(llm, tmp_path / "logits", lambda: forced(llm, streams, prompts))
        (whole,) = llm.collective_rpc("receipt")
        generate(llm, prompts_of([9], seed=13), 2)  # no prompt of the reference: its router logits are zero
        (receipt,) = llm.collective_rpc("replace_stop")
    assert sites == names and whole["replacement"]["whole"]
    assert receipt["zeroed"] == names and receipt["rows"]["live"] == 10 and not receipt["whole"]
    for number, rows in enumerate(expected):
        for position, row in enumerate(rows):
            assert (found[number, position] - row).abs().max() < 1e-4, (number, position)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_two_ranks_hold_their_shares(tiny: Callable[..., Path], tmp_path: Path, eager: bool) -> None:
    """Heads are divided over the ranks: captures have all of them, references are cut up."""
    path, other = tiny("gemma3"), tiny("gemma3", seed=3)
    prompts = prompts_of(LENGTHS, seed=9)
    streams = [prompt + tail for prompt, tail in zip(prompts, prompts_of([NEW] * 4, seed=10), strict=True)]
    sites = ["**.q_rope", "**.k_rope", "**.heads", "**.o_proj.input", "model.layers.*", "model.norm", "lm_head"]
    ours, theirs = model_of(path), model_of(other)
    truth = rows_of(ours, streams, sites)
    reference = rows_of(theirs, streams, ["**.heads"])
    with launch.engine(
        path,
        dtype="float32",
        enforce_eager=eager,
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        additional_config=CONFIG,
    ) as llm:
        llm.collective_rpc("capture_start", args=(str(tmp_path / "plain"), sites))
        forced(llm, streams, prompts)
        llm.collective_rpc("capture_stop")
        source = write(tmp_path / "reference", prompts, reference)
        llm.collective_rpc("replace_start", args=(source,))
        llm.collective_rpc("capture_start", args=(str(tmp_path / "replaced"), ["**.o_proj.input", "**.heads"]))
        forced(llm, streams, prompts)
        llm.collective_rpc("capture_stop")
        receipts = llm.collective_rpc("replace_stop")
    assert all(receipt["whole"] for receipt in receipts)
    plain = Captures.open(tmp_path / "plain")
    assert plain.notes["shares"] == {}
    for prompt, want in zip(prompts, truth, strict=True):
        (request,) = plain.find(prompt)
        for site in plain.sites:
            positions, rows = plain.get(request, site)
            assert rows.shape[1:] == want[site].shape[1:], site
            assert (rows - want[site][positions]).abs().max() < 2e-4, site
    replaced = Captures.open(tmp_path / "replaced")
    for prompt, want in zip(prompts, reference, strict=True):
        (request,) = replaced.find(prompt)
        for layer in range(2):
            name = f"model.layers.{layer}.self_attn"
            _, rows = replaced.get(request, f"{name}.o_proj.input")
            assert torch.equal(rows, want[f"{name}.heads"].flatten(1)), "what o_proj was given is the reference"
