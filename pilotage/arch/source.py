"""From what a user types as MODEL to files on this machine."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotage.core.errors import BadInput, ConfigError, PilotageError, Unavailable, Unsupported

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GEMMA = "gemma3-270m"
_TINY = (
    *("tiny:llama3", "tiny:gemma3", "tiny:qwen2", "tiny:qwen3"),
    *("tiny:gemma2", "tiny:deepseek_v3", "tiny:gpt_oss", "tiny:mistral", "tiny:mixtral", "tiny:qwen3_moe"),
)
# Asking whether the hub answers must not cost a machine without a network more than this.
_HUB_TIMEOUT_S = 5.0
_CHECKPOINT_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*"]


def resolve(model: str) -> Path:
    """Return the directory of a full checkpoint: config.json, safetensors and tokenizer.

    Args:
        model: a directory, `gemma3-270m` or `tiny:<name>[@seed]` (built on first use, then reused), or a hub id
            (from the local cache, else from the hub when it answers).

    Raises:
        BadInput: no such model or directory, or a directory that holds no usable checkpoint.
        Unavailable: the hub is needed and cannot be reached, or the model is gated.
        Unsupported: weights in a format other than safetensors.
    """
    built = _built(model)
    if built is not None:
        return built
    path = _local(model)
    if path is None:
        path = _from_hub(model, _CHECKPOINT_FILES)
    if path.is_file():
        raise BadInput(
            "this is a file; a checkpoint directory is needed here", where=str(path), do="name the directory"
        )
    _check_config_file(path)
    _check_weight_files(path)
    return path


def config_dir(model: str) -> Path:
    """Return a directory that holds at least config.json, or the path of a config file; no weights are downloaded.

    Raises:
        BadInput, Unavailable: as for `resolve`.
    """
    if model == GEMMA:
        from pilotage.arch import gemma

        return gemma.config_directory()
    built = _built(model)
    if built is not None:
        return built
    path = _local(model)
    if path is None:
        path = _from_hub(model, ["config.json"])
    _check_config_file(path)
    return path


def load_config(model: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the Hugging Face configuration of `model` (see `config_dir`).

    Raises:
        BadInput: no configuration there, or not valid JSON.
        ConfigError: a value that its configuration class refuses.
        Unsupported: a `model_type` that transformers does not know, or one that needs code from the repository.
    """
    path = config_dir(model)
    file = path if path.is_file() else path / "config.json"
    raw = _read_config(file)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if "auto_map" in raw and model_type not in CONFIG_MAPPING and not trust_remote_code:
        raise Unsupported(
            f"model_type {model_type!r} is defined by code inside the repository",
            where=str(file),
            do="read that code, then pass trust_remote_code=True if you trust it",
        )
    if not trust_remote_code and model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), n=1, cutoff=0.0)
        said = f"model_type {model_type!r} is not known" if model_type else "no model_type is stated"
        raise Unsupported(
            f"{said} to transformers", where=str(file), do=f"the nearest known one is {near[0]!r}" if near else None
        )
    try:
        return AutoConfig.from_pretrained(str(file), trust_remote_code=trust_remote_code)
    except PilotageError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"transformers refuses this configuration: {reason[-1] if reason else type(error).__name__}",
            where=str(file),
            do="correct the named field",
        ) from error


def _built(model: str) -> Path | None:
    if model == GEMMA:
        from pilotage.arch import gemma

        return gemma.build()
    if model.startswith("tiny:"):
        from pilotage.arch import tiny

        name, seed = tiny.parse(model)
        return tiny.build(name, seed=seed)
    return None


def _local(model: str) -> Path | None:
    """Return `model` as an existing path, None when it can only be a hub id."""
    if not model.strip():
        raise BadInput("no model is named", where="MODEL", do="name a directory, gemma3-270m or tiny:gemma3")
    path = Path(model).expanduser()
    if path.exists():
        return path
    parts = Path(model).parts
    if model.startswith(("/", ".", "~")) or model.endswith((".json", "/")) or len(parts) > 2 or "\\" in model:
        parent = path.parent
        near = (
            difflib.get_close_matches(path.name, [found.name for found in parent.iterdir()]) if parent.is_dir() else []
        )
        raise BadInput(
            "no such file or directory",
            where=model,
            do=f"the nearest name beside it is {near[0]!r}" if near else "check the path",
        )
    return None


def _check_config_file(path: Path) -> None:
    file = path if path.is_file() else path / "config.json"
    if not file.is_file():
        raise BadInput(
            "this directory holds no config.json", where=str(path), do="name the directory that config.json is in"
        )
    _read_config(file)


def _read_config(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"not valid JSON ({error})", where=str(file), do="repair or replace the file") from error
    except OSError as error:
        raise BadInput(f"cannot be read ({error.strerror})", where=str(file)) from error
    if not isinstance(raw, dict):
        raise BadInput("not a JSON object", where=str(file), do="name a model's config.json")
    return raw


def _check_weight_files(path: Path) -> None:
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return
    others = sorted(found.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for found in path.glob(kind))
    if others:
        raise Unsupported(
            f"the weights are in {others[0]}, not in safetensors",
            where=str(path),
            do="convert them: load with transformers, then save_pretrained",
        )
    raise BadInput("this directory holds no *.safetensors", where=str(path), do="name a complete checkpoint")


def _from_hub(model: str, files: list[str]) -> Path:
    """Return a snapshot of `model` from the local Hugging Face cache, else from the hub."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    near = _nearest(model)
    if "/" not in model and near:
        # Short names are ours: a slip of the pen should not become a question to the hub.
        raise BadInput("no model of this name is known", where=model, do=f"the nearest known name is {near!r}")
    try:
        path = Path(snapshot_download(model, allow_patterns=files, local_files_only=True))
        if (path / "config.json").is_file() and (files == ["config.json"] or any(path.glob("*.safetensors"))):
            return path
    except HFValidationError as error:
        raise BadInput(f"not a directory, and not a Hugging Face id ({error})", where=model) from error
    except (LocalEntryNotFoundError, FileNotFoundError):
        pass
    unreachable = Unavailable(
        "not in the local Hugging Face cache, and no hub can be reached",
        where=model,
        do="name a local directory (a config.json is enough for diff), gemma3-270m, or one of " + ", ".join(_TINY),
    )
    if constants.HF_HUB_OFFLINE or not _hub_answers(constants.ENDPOINT):
        raise unreachable
    try:
        return Path(snapshot_download(model, allow_patterns=files, etag_timeout=_HUB_TIMEOUT_S))
    except GatedRepoError as error:
        raise Unavailable(
            "this model is gated: its owner asks you to accept terms first",
            where=model,
            do="accept them on the model's page, then set HF_TOKEN; or name a local directory",
        ) from error
    except RepositoryNotFoundError as error:
        raise BadInput(
            "the hub knows no such model, or it is private",
            where=model,
            do="check the spelling, or set HF_TOKEN" + (f"; the nearest known name is {near!r}" if near else ""),
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise unreachable from error


def _nearest(model: str) -> str | None:
    near = difflib.get_close_matches(model, [GEMMA, *_TINY], n=1, cutoff=0.5)
    return near[0] if near else None


def _hub_answers(endpoint: str) -> bool:
    import httpx

    try:
        httpx.head(endpoint, timeout=_HUB_TIMEOUT_S, follow_redirects=False)
    except (httpx.HTTPError, OSError):
        return False
    return True
