"""Our training classes in NeMo AutoModel, and its compiled norm under tensor parallelism, which our check must name.

Runs where NeMo AutoModel is installed: it asks for another transformers than ours, so not beside the other tests
(docs/training.md says how).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faces import batch, gradients, hf_face

pytest.importorskip("nemo_automodel", reason="NeMo AutoModel is not installed (pilotage[automodel])")

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from ranks import run

Tiny = Callable[..., Path]


def nemo_backend(rms_norm: str = "torch") -> Any:
    from nemo_automodel.components.models.common import BackendConfig

    return BackendConfig(attn="sdpa", linear="torch", rms_norm=rms_norm, rope_fusion=False)


def nemo_llama(path: Path, rms_norm: str = "torch") -> Any:
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoConfig

    model = LlamaForCausalLM.from_config(AutoConfig.from_pretrained(path), nemo_backend(rms_norm))
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    return model.train()


def test_it_builds_our_classes(tiny: Tiny) -> None:
    from nemo_automodel._transformers.registry import ModelRegistry
    from transformers import AutoConfig

    from pilotage.models import automodel, registry

    # What it does not have comes by the entry points, which name this package's faces.
    for name in ("Gemma3ForCausalLM", "MixtralForCausalLM"):
        assert ModelRegistry.model_arch_name_to_cls[name] is registry.training_class([name])
    assert set(automodel.register()) == set(registry.MODEL_ARCH_MAPPING)
    for tiny_name in ("llama3", "qwen3", "gemma3", "qwen3_moe"):
        path = tiny(tiny_name)
        config = AutoConfig.from_pretrained(path)
        cls = ModelRegistry.resolve_custom_model_cls(config.architectures[0], config)
        assert cls is registry.training_class(config.architectures)
        ours = cls.from_config(config, nemo_backend())
        theirs = hf_face(path)
        ours.load_state_dict(theirs.state_dict())
        expected, wanted = gradients(theirs, batch(config.pad_token_id))
        got, found = gradients(ours.train(), batch(config.pad_token_id))
        torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=1e-5)
        for key, gradient in wanted.items():
            assert (found[key] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), key
    assert ModelRegistry.has_retrieval_model("Qwen3ForSequenceClassification")


def parallel_step(rank: int, path: Path, rms_norm: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from pilotage.accuracy.training_cases import Step

    model, mesh = nemo_llama(path, rms_norm), init_device_mesh("cpu", (2,))
    columns = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    columns |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan |= {
        f"model.layers.{i}.{name}": s for i in range(len(model.model.layers)) for name, s in (columns | rows).items()
    }
    parallelize_module(model, mesh, plan)
    given = batch(model.config.pad_token_id)
    output = model(**given)
    output.loss.backward()

    def whole(gradient: Any) -> Any:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    return Step(
        logits=whole(output.logits).detach()[given["attention_mask"].bool()],
        loss=float(whole(output.loss)),
        gradients={name: whole(parameter.grad) for name, parameter in model.named_parameters()},
    )


def plain_step(model: Any) -> Any:
    from pilotage.accuracy.training_cases import Step

    given = batch(model.config.pad_token_id)
    output, found = gradients(model, given)
    return Step(logits=output.logits.detach()[given["attention_mask"].bool()], loss=float(output.loss), gradients=found)


def test_the_gradient_that_its_compiled_norm_loses_is_named(tiny: Tiny, tmp_path: Path) -> None:
    from pilotage.accuracy.training import compare

    path = tiny("llama3")
    truth = plain_step(hf_face(path))
    steps = {}
    for rms_norm in ("torch", "torch_fp32"):
        (tmp_path / rms_norm).mkdir()
        steps[rms_norm] = run(parallel_step, 2, tmp_path / rms_norm, path, rms_norm)[0]
    # Two ranks add in another order than one: what the sound norm makes of that is the measure.
    for name, gradient in truth.gradients.items():
        error = (steps["torch"].gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name
    result = compare("float32", "two ranks, torch_fp32", steps["torch_fp32"], truth, steps["torch"])
    failing = {entry["parameter"]: entry["relative_l2"] for entry in result.parameters if entry["status"] == "fail"}
    assert [name for name, error in failing.items() if error > 1e-3] == ["model.embed_tokens.weight"]
    assert abs(steps["torch_fp32"].loss - truth.loss) < 1e-5, "forward parity and the loss cannot see it"
