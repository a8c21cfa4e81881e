"""MODEL, as users type it, to files; and every way of typing it wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotage.arch import source
from pilotage.arch.lock import built_once
from pilotage.core.errors import BadInput, ConfigError, PilotageError, StorageError, Unavailable, Unsupported


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "home"


def test_tiny_models_are_built_once_in_the_cache(home: Path) -> None:
    path = source.resolve("tiny:llama3")
    assert path.is_relative_to(home) and (path / "model.safetensors").is_file()
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert source.resolve("tiny:llama3") == path == source.config_dir("tiny:llama3")
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    assert source.resolve("tiny:llama3@1") != path


def test_a_directory_and_a_config_file_are_taken_as_they_are(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("gemma3")
    assert source.resolve(str(path)) == path
    only = tmp_path / "elsewhere.json"
    shutil.copy(path / "config.json", only)
    assert source.config_dir(str(only)) == only
    for model in (str(path), str(only)):
        assert source.load_config(model).sliding_window == 16
    with pytest.raises(BadInput, match="this is a file"):
        source.resolve(str(only))


def test_the_gemma_config_needs_no_weights(home: Path) -> None:
    config = source.load_config("gemma3-270m")
    assert (config.num_hidden_layers, config.vocab_size, config.sliding_window) == (18, 262144, 512)
    assert sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) < 10_000


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("", BadInput, "no model is named"),
        ("/nowhere/at/all", BadInput, "/nowhere/at/all: no such file or directory"),
        ("./nowhere", BadInput, "no such file or directory"),
        ("a/b/c", BadInput, "no such file or directory"),
        ("nowhere.json", BadInput, "no such file or directory"),
        ("gemma3-270", BadInput, "the nearest known name is 'gemma3-270m'"),
        ("tiny-gemma3", BadInput, "the nearest known name is 'tiny:gemma3'"),
        ("tiny:falcon", BadInput, "no tiny model is called 'falcon'"),
        ("bad name/here", BadInput, "not a Hugging Face id"),
        ("meta-llama/Llama-3.1-8B", Unavailable, "no hub can be reached; name a local directory"),
        ("gpt2", Unavailable, "no hub can be reached"),
    ],
)
@pytest.mark.parametrize("find", [source.resolve, source.config_dir])
def test_names_that_lead_nowhere_are_explained(
    find: Callable[[str], Path], model: str, error: type[PilotageError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_hub_answers", lambda endpoint: False)
    with pytest.raises(error, match=message):
        find(model)


def test_a_slip_in_a_path_names_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "gemma-checkpoint").mkdir()
    with pytest.raises(BadInput, match="the nearest name beside it is 'gemma-checkpoint'"):
        source.resolve(str(tmp_path / "gema-checkpoint"))


def test_what_the_hub_answers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants, errors

    response = type("Response", (), {"headers": {}, "request": None, "status_code": 403})()
    answers = {
        "gated/model": (errors.GatedRepoError("gated", response=response), Unavailable, "gated: .*accept"),
        "no/model": (errors.RepositoryNotFoundError("404", response=response), BadInput, "knows no such model"),
        "slow/model": (errors.LocalEntryNotFoundError("timeout"), Unavailable, "no hub can be reached"),
    }

    def download(model: str, *, local_files_only: bool = False, **_: object) -> str:
        raise errors.LocalEntryNotFoundError("not cached") if local_files_only else answers[model][0]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(source, "_hub_answers", lambda endpoint: True)
    for model, (_, error, message) in answers.items():
        with pytest.raises(error, match=message):
            source.resolve(model)


def test_offline_means_that_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(source, "_hub_answers", lambda endpoint: pytest.fail("asked the hub"))
    with pytest.raises(Unavailable, match="no hub can be reached"):
        source.resolve("acme/small")


def test_a_model_in_the_local_hub_cache_needs_no_hub(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--acme--small" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny("qwen3"), snapshot)
    refs = cache / "models--acme--small" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(source, "_hub_answers", lambda endpoint: pytest.fail("asked the hub"))
    assert source.resolve("acme/small") == snapshot
    assert source.load_config("acme/small").model_type == "qwen3"


def test_directories_without_what_is_needed_are_explained(tiny: Callable[..., Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(BadInput, match=r"holds no config\.json"):
        source.resolve(str(empty))
    shutil.copy(tiny("llama3") / "config.json", empty)
    with pytest.raises(BadInput, match=r"holds no \*\.safetensors"):
        source.resolve(str(empty))
    (empty / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"pytorch_model\.bin, not in safetensors; convert"):
        source.resolve(str(empty))
    assert source.config_dir(str(empty)) == empty


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", BadInput, "not valid JSON"),
        ("[1]", BadInput, "not a JSON object"),
        ("\udcff", BadInput, "not valid JSON"),
        (
            '{"model_type": "lama"}',
            Unsupported,
            "'lama' is not known to transformers; the nearest known one is 'llama'",
        ),
        ("{}", Unsupported, "no model_type is stated"),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "c.C"}}', Unsupported, "code inside the repository"),
        ('{"model_type": "llama", "hidden_size": "many"}', ConfigError, "transformers refuses this configuration"),
    ],
)
def test_a_bad_config_is_explained(tmp_path: Path, text: str, error: type[PilotageError], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(error, match=message) as caught:
        source.load_config(str(file))
    assert str(file) in str(caught.value)


def _build(path: Path) -> None:
    def write(directory: Path) -> None:
        time.sleep(0.3)
        with open(path.parent / "builds", "a") as log:
            log.write(f"{os.getpid()}\n")
        (directory / "file").write_text("whole")

    built_once(path, write)


def test_processes_that_ask_at_once_build_once(tmp_path: Path) -> None:
    path = tmp_path / "thing"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build, args=(path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "builds").read_text().split()) == 1
    assert (path / "file").read_text() == "whole"


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "thing"

    def fail(directory: Path) -> None:
        (directory / "file").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        built_once(path, fail)
    assert [file.name for file in tmp_path.iterdir()] == [".thing.lock"]
    built_once(path, lambda directory: (directory / "file").write_text("whole") and None)
    assert (path / "file").read_text() == "whole"


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        built_once(tmp_path / "thing", lambda directory: os._exit(9))
    os.waitpid(pid, 0)
    assert len(list(tmp_path.glob(".thing.*.part"))) == 1 and not (tmp_path / "thing").exists()
    built_once(tmp_path / "thing", lambda directory: None)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".thing.lock", "thing"]


def test_a_full_disk_while_building_is_told_so(tmp_path: Path) -> None:
    from safetensors import SafetensorError

    def fill(directory: Path) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with pytest.raises(StorageError, match="no space left"):
        built_once(tmp_path / "thing", fill)
    assert not (tmp_path / "thing").exists()


def test_every_known_model_type_survives_loading_as_json(tiny: Callable[..., Path]) -> None:
    for name in ("llama3", "gemma3", "qwen2", "qwen3"):
        stated = json.loads((tiny(name) / "config.json").read_text())
        loaded = source.load_config(str(tiny(name)))
        for key in ("rope_parameters", "rms_norm_eps", "head_dim", "tie_word_embeddings"):
            assert getattr(loaded, key) == stated[key], key
