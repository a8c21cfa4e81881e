"""What a user gets wrong is said in one line, with the place and a way out."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import generate, prompts_of

from pilotage.core.errors import BadInput, ConfigError, PilotageError, Unsupported, WeightError
from pilotage.serving import launch

pytestmark = pytest.mark.engine


def start(path: Path, **options: Any) -> None:
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, **options}
    with launch.engine(path, **settings):
        raise AssertionError("the engine started")


def edited(path: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(path, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_unknown_config_key(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match='unknown key "num_seq_buckets"; did you mean "num_seqs_buckets"'):
        start(tiny("llama3"), additional_config={"num_seq_buckets": [1]})


def test_buckets_above_the_limit(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="bucket 64 can never be used: max_num_seqs is 4"):
        start(tiny("llama3"), max_num_seqs=4, additional_config={"num_seqs_buckets": [1, 64]})


def test_unknown_architecture(tiny: Callable[..., Path], tmp_path: Path) -> None:
    # One that vLLM knows, and neither a package here nor transformers.
    path = edited(tiny("llama3"), tmp_path / "m", architectures=["OrionForCausalLM"])
    with pytest.raises(Unsupported, match=r"no model package for architecture OrionForCausalLM .*Gemma3ForCausalLM"):
        start(path)


def test_an_architecture_that_is_not_that_of_the_model_type(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """transformers would serve it as the model of its type, silently."""
    path = edited(tiny("llama3"), tmp_path / "m", architectures=["OlmoForCausalLM"])
    with pytest.raises(Unsupported, match=r"architecture OlmoForCausalLM and model type llama"):
        start(path)


def test_features_of_vllm_that_this_target_lacks(tiny: Callable[..., Path]) -> None:
    speculative = {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(Unsupported, match="speculative decoding by 'ngram_gpu' is not implemented"):
        start(tiny("llama3"), speculative_config=speculative)


def test_truncated_checkpoint(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = edited(tiny("llama3"), tmp_path / "m")
    (file,) = path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(PilotageError) as caught:
        start(path)
    assert file.name in str(caught.value)


@pytest.mark.slow
@pytest.mark.distributed
def test_truncated_checkpoint_with_two_ranks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The error of a worker process arrives as it was raised there."""
    path = edited(tiny("llama3"), tmp_path / "m", num_hidden_layers=5)
    with pytest.raises(WeightError, match=r"layers\.4"):
        start(path, tensor_parallel_size=2)


def test_prompts_that_are_too_long(tiny: Callable[..., Path]) -> None:
    from vllm.exceptions import VLLMValidationError

    with launch.engine(
        tiny("llama3"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        enable_chunked_prefill=False,
        additional_config={"num_batched_tokens_buckets": [16, 32]},
    ) as llm:
        with pytest.raises(VLLMValidationError, match="largest prefill bucket is 32"):
            generate(llm, prompts_of((40,), seed=1), 2)
        with pytest.raises((ValueError, VLLMValidationError), match="64"):
            generate(llm, prompts_of((65,), seed=1), 2)
        # The refusals did no harm.
        assert len(generate(llm, prompts_of((32,), seed=1), 2)[0].outputs[0].token_ids) == 2


def test_kv_cache_larger_than_the_memory(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        start(tiny("llama3"), kv_cache_memory_bytes=1 << 50)


def test_port_in_use(tiny: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"port {port}: cannot listen on it"), launch.server("m", port=port):
            pass


def serve_fails(path: Path, *arguments: str) -> str:
    """Run `vllm serve`, which must end with the exit code of a user's mistake; returns what it said."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(launch.free_port()), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_vllm_serve_says_it_in_one_line(tiny: Callable[..., Path]) -> None:
    said = serve_fails(tiny("llama3"), "--additional-config", '{"pilotage": {"ep_degre": 2}}')
    assert 'pilotage: additional_config.pilotage: unknown key "ep_degre"; did you mean "ep_degree"?' in said


@pytest.mark.slow
def test_vllm_serve_names_a_port_in_use(tiny: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = serve_fails(tiny("llama3"), "--port", str(taken.getsockname()[1]))
    assert "pilotage: vllm serve: the address is in use; choose another --port" in said
