"""Training faces against transformers, tiny and perturbed: logits, loss and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import NAMES, apart, batch, gradients, hf_face, mixes_packed, our_face, packed

Tiny = Callable[..., Path]
# Of a gradient, relative to its largest value: the same operators, except that heads are normalised before they are
# transposed and not after, which leaves sums in another order.
BOUND = 2e-6
# Latent attention is computed in the space of the latents, in which transformers does not.
LATENT_BOUND, LATENT_TOLERANCE = 4e-5, 8e-5
# The others share their code with these: whole in `make test-all`.
SLOW = ("mistral", "mixtral", "gemma2", "qwen2", "qwen3")
COVERED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]


@pytest.fixture(scope="module", params=COVERED)
def pair(request: pytest.FixtureRequest, tiny: Tiny) -> tuple[Any, Any]:
    path = tiny(request.param)
    return hf_face(path), our_face(path)


def compare(pair: tuple[Any, Any], given: dict[str, Any]) -> None:
    expected, wanted = gradients(pair[0], given)
    got, found = gradients(pair[1], given)
    latent = pair[0].config.model_type == "deepseek_v3"
    # Sequences that run one after another are summed in another order again.
    bound = LATENT_BOUND if latent else 2 * BOUND if "use_cache" in given and mixes_packed(pair[0]) else BOUND
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=LATENT_TOLERANCE if latent else 1e-5)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5 if latent else 1e-6, atol=0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= bound, f"{name}: {error}"


@pytest.mark.parametrize("given", ["padded", "packed"])
def test_logits_loss_and_gradients_equal_hf(pair: tuple[Any, Any], given: str) -> None:
    compare(pair, batch(pair[0].config.pad_token_id) if given == "padded" else packed())


def test_packed_sequences_do_not_see_one_another(pair: tuple[Any, Any]) -> None:
    """Whether a cache is asked for or not."""
    given, ours = packed(), pair[1]
    with torch.no_grad():
        alone = apart(ours, given).logits
        bound = LATENT_TOLERANCE if ours.config.model_type == "deepseek_v3" else 3e-5
        torch.testing.assert_close(ours(**given).logits, alone, rtol=0, atol=bound)
        torch.testing.assert_close(ours(**given | {"use_cache": True}).logits, alone, rtol=0, atol=bound)


def test_checkpointing_changes_nothing(pair: tuple[Any, Any]) -> None:
    _, ours = pair
    given = batch(ours.config.pad_token_id)
    before, wanted = gradients(ours, given)
    ours.gradient_checkpointing_enable()
    try:
        after, found = gradients(ours, given)
    finally:
        ours.gradient_checkpointing_disable()
    assert after.past_key_values is None and before.past_key_values is not None
    assert torch.equal(after.logits, before.logits)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen3_moe"])
def test_round_trip_is_exact_and_transformers_reads_it(name: str, tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from pilotage.weights import SafetensorsCheckpoint

    path = tiny(name)
    ours = our_face(path)
    ours.save_pretrained(tmp_path / "saved")
    before, after = SafetensorsCheckpoint(path), SafetensorsCheckpoint(tmp_path / "saved")
    assert set(after.keys()) == set(before.keys())
    for key in before.keys():  # noqa: SIM118  no mapping
        assert torch.equal(after[key][:], before[key][:]), key
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert type(theirs).__name__ == type(ours).__name__
    assert type(theirs).__module__.startswith("transformers.")
    other = theirs.state_dict()
    assert all(torch.equal(value, other[key]) for key, value in ours.state_dict().items())
    assert hasattr(ours, "state_dict_adapter") == (name == "qwen3_moe")


@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_tied_as_the_config_says(tied: bool, tiny: Tiny) -> None:
    path = tiny("llama3", tie_word_embeddings=tied)
    pair = hf_face(path), our_face(path)
    assert (pair[1].lm_head.weight is pair[1].model.embed_tokens.weight) is tied
    compare(pair, batch(pair[0].config.pad_token_id))


def test_a_policy_refuses_the_other_kind_of_head(tiny: Tiny) -> None:
    from transformers import AutoConfig

    from pilotage.core.errors import Unsupported
    from pilotage.models.common.hf import TieSupport
    from pilotage.models.llama3.hf import LlamaForCausalLM

    class TiedOnly(LlamaForCausalLM):
        tie_word_embeddings_support = TieSupport.TIED_ONLY

    class UntiedOnly(LlamaForCausalLM):
        tie_word_embeddings_support = TieSupport.UNTIED_ONLY

    untied = AutoConfig.from_pretrained(tiny("llama3"))
    tied = AutoConfig.from_pretrained(tiny("llama3", tie_word_embeddings=True))
    with pytest.raises(Unsupported, match="tied only"):
        TiedOnly.from_config(untied)
    with pytest.raises(Unsupported, match="untied only"):
        UntiedOnly.from_config(tied)
    TiedOnly.from_config(tied)
    UntiedOnly.from_config(untied)


def test_generate_equals_hf(tiny: Tiny) -> None:
    for name in ("llama3", "gemma3"):
        path = tiny(name)
        theirs, ours = hf_face(path).eval(), our_face(path).eval()
        given = batch(theirs.config.pad_token_id, left=9, right=0, length=40)
        prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": theirs.config.pad_token_id}
        wanted = theirs.generate(**prompt, **options)
        assert torch.equal(ours.generate(**prompt, **options), wanted)
        assert torch.equal(ours.generate(**prompt, cache_implementation="static", **options), wanted)
        assert torch.equal(ours.generate(**prompt, use_cache=False, **options), wanted)


def test_logits_to_keep_and_recorded_outputs_equal_hf(tiny: Tiny) -> None:
    path = tiny("qwen3_moe")
    theirs, ours = hf_face(path, attention="eager"), our_face(path, attn_implementation="eager")
    given = batch(theirs.config.pad_token_id)
    asked = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    wanted, found = theirs(**given, **asked), ours(**given, **asked)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(found[name]) == len(wanted[name])
        for one, other in zip(found[name], wanted[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.aux_loss, wanted.aux_loss)
    torch.testing.assert_close(found.loss, wanted.loss)
    prompt = {key: given[key] for key in ("input_ids", "attention_mask")}
    assert torch.equal(ours(**prompt, logits_to_keep=3).logits, ours(**prompt).logits[:, -3:])


def test_a_checkpoint_that_lacks_a_weight_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from pilotage.core.errors import WeightError

    path = tmp_path / "lacking"
    shutil.copytree(tiny("qwen3"), path)
    tensors = load_file(path / "model.safetensors")
    lost = tensors.pop("model.layers.2.self_attn.k_norm.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match="k_norm"):
        our_face(path)
    tensors |= {"model.layers.2.self_attn.k_norm.weight": lost, "model.layers.2.extra": lost.clone()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match="extra"):
        our_face(path)


def test_classification_equals_hf(tiny: Tiny) -> None:
    from transformers import AutoModelForSequenceClassification

    from pilotage.models import registry

    path = tiny("qwen3")
    module, name, tags = registry.MODEL_ARCH_MAPPING["Qwen3ForSequenceClassification"]
    assert tags == {"retrieval"}
    cls = registry.training_class([name])
    assert cls.__module__ == module
    theirs = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=4).train()
    ours = cls.from_pretrained(path, dtype=torch.float32, num_labels=4).train()
    ours.score.weight.data.copy_(theirs.score.weight.data)
    given = batch(theirs.config.pad_token_id)
    given["labels"] = torch.tensor([0, 3, 1])
    expected, wanted = gradients(theirs, given)
    got, found = gradients(ours, given)
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))


def test_model_py_gives_the_face_by_name(tiny: Tiny) -> None:
    from pilotage.models.llama3 import hf, model

    assert model.ModelClass is hf.LlamaForCausalLM
    assert model.LlamaPreTrainedModel is hf.LlamaPreTrainedModel
    with pytest.raises(AttributeError):
        model.LlamaForTokenClassification  # noqa: B018
    # The documented way: the class of that name in `model.py`, which itself is the one that is served.
    from transformers import AutoConfig

    assert type(model.LlamaForCausalLM.from_config(AutoConfig.from_pretrained(tiny("llama3")))) is hf.LlamaForCausalLM


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_combined_projections_compute_and_save_the_same(name: str, tiny: Tiny, tmp_path: Path) -> None:
    from pilotage.models.common import BackendConfig
    from pilotage.weights import SafetensorsCheckpoint

    path = tiny(name)
    separate, combined = our_face(path), our_face(path, backend=BackendConfig(combined=True))
    attention = combined.model.layers[1].self_attn
    assert not hasattr(attention, "q_proj") and hasattr(combined.model.layers[1].mlp, "gate_up_proj")
    other = separate.model.layers[1].self_attn
    rows = torch.cat([other.q_proj.weight, other.k_proj.weight, other.v_proj.weight])
    assert torch.equal(attention.qkv_proj.weight, rows)
    given = batch(separate.config.pad_token_id)
    wanted, gradients_wanted = gradients(separate, given)
    got, found = gradients(combined, given)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-5)
    as_separate = combined.state_dict_adapter.to_hf(found)
    for key, gradient in gradients_wanted.items():
        if key in as_separate:
            assert (as_separate[key] - gradient).abs().max() <= 4 * BOUND * gradient.abs().max(), key
    combined.save_pretrained(tmp_path / "saved")
    before, after = SafetensorsCheckpoint(path), SafetensorsCheckpoint(tmp_path / "saved")
    assert set(after.keys()) == set(before.keys())
    assert all(torch.equal(after[key][:], before[key][:]) for key in before.keys())  # noqa: SIM118


def test_contexts_survive_what_fully_shard_does_to_arguments() -> None:
    from torch.distributed.utils import _apply_to_tensors

    from pilotage.models.common.dense import DenseContext

    class Config:
        attention_dropout = 0.0

    context = DenseContext(Config(), {}, positions=torch.zeros(1, 3), input_ids=None)
    assert _apply_to_tensors(lambda tensor: tensor.bfloat16(), (context,))[0] is context


def test_attention_goes_through_transformers_functions(tiny: Tiny) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    from pilotage.core.errors import Unsupported

    seen: list[tuple[int, float, bool]] = []

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((module.layer_idx, kwargs["scaling"], kwargs["sliding_window"] is not None))
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("counted", counted)
    ALL_MASK_ATTENTION_FUNCTIONS.register("counted", sdpa_mask)
    ours = our_face(tiny("gemma3"))
    given = batch(ours.config.pad_token_id)
    wanted = ours(**given).logits
    ours.set_attn_implementation("counted")
    assert torch.equal(ours(**given).logits, wanted)
    windows = [kind == "sliding_attention" for kind in ours.config.layer_types]
    assert [(index, window) for index, _, window in seen] == list(enumerate(windows))
    bounded = our_face(tiny("gemma2"))
    assert bounded.config._attn_implementation == "eager"
    bounded.config._attn_implementation = "sdpa"
    with pytest.raises(Unsupported, match="ignores a bound"):
        bounded(**given)


@pytest.mark.slow  # transformers compiles it
def test_flex_attention_computes_the_same(tiny: Tiny) -> None:
    from pilotage.models.common import BackendConfig

    path = tiny("gemma3")
    given = {key: value for key, value in batch(0).items() if key != "labels"}
    with torch.no_grad():
        wanted = our_face(path).eval()(**given, use_cache=False).logits
        found = our_face(path, backend=BackendConfig(attn="flex")).eval()(**given, use_cache=False).logits
    real = given["attention_mask"].bool()
    torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=3e-5)
