"""What breaks is said, and ends: a killed engine, a damaged checkpoint, a full disk, a server that nobody may reach."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import generate, prompts_of
from safetensors.torch import load_file, save_file

from pilotage.core.errors import PilotageError, WeightError
from pilotage.serving import launch

pytestmark = pytest.mark.engine
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def start(path: Path) -> None:
    with launch.engine(path, dtype="float32", enforce_eager=True, max_model_len=64):
        raise AssertionError("the engine started")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(value: float, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tiny("llama3"), path)
    (file,) = path.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.2.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"not finite .*layers\.2\.mlp\.down_proj"):
        start(path)


def test_a_shard_whose_header_is_damaged(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "m"
    shutil.copytree(tiny("llama3"), path)
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[8:40] = os.urandom(32)
    file.write_bytes(data)
    with pytest.raises(PilotageError) as caught:
        start(path)
    assert file.name in str(caught.value)


def test_an_engine_that_is_killed_ends_the_server(tiny: Callable[..., Path]) -> None:
    with launch.server(
        tiny("llama3"), dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=2
    ) as server:
        parent = psutil.Process(server.pid)
        (core,) = [child for child in parent.children(recursive=True) if "EngineCore" in " ".join(child.cmdline())]
        answers: list[Any] = []

        def ask() -> None:
            body = {"model": server.model, "prompt": [7], "max_tokens": 1000, "ignore_eos": True}
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with HTTP.open(request, timeout=60) as answer:
                    answers.append(answer.status)
            except (urllib.error.URLError, OSError) as error:
                answers.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1.0)
        core.send_signal(signal.SIGKILL)
        asking.join(timeout=30)
        assert not asking.is_alive(), "a request hangs"
        assert len(answers) == 1
        assert answers != [200], "the request was answered before the engine was killed: lengthen it"
        _, alive = psutil.wait_procs([parent], timeout=30)
        assert not alive, "the server outlives its engine"
        with pytest.raises(urllib.error.URLError):
            HTTP.open(f"{server.url}/health", timeout=5)
        assert "died" in server.log.read_text().lower() or "dead" in server.log.read_text().lower()


STARTS = {
    "server": "launch.server(path, **how)",
    "engine on two ranks": "launch.engine(path, tensor_parallel_size=2, **how)",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", STARTS)
def test_nothing_outlives_a_command_that_is_killed(what: str, tiny: Callable[..., Path]) -> None:
    """SIGKILL lets nobody tidy up."""
    code = f"""
        import time
        from pilotage.serving import launch
        path, how = {str(tiny("llama3"))!r}, dict(dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2)
        if __name__ == "__main__":
            with {STARTS[what]}:
                print("there", flush=True)
                time.sleep(300)
    """
    command = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert command.stdout is not None and command.stdout.readline().strip() == "there"
        started = psutil.Process(command.pid).children(recursive=True)
        assert started
    finally:
        command.kill()
        command.communicate()
    _, alive = psutil.wait_procs(started, timeout=40)
    assert not alive, [" ".join(process.cmdline()) for process in alive]


def test_a_server_listens_on_this_machine_alone_unless_told() -> None:
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args([]).host == "127.0.0.1"
    assert parser.parse_args(["--host", "0.0.0.0"]).host == "0.0.0.0"


@pytest.mark.slow
def test_a_cache_directory_that_is_full(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost but the next start's time: the engine serves the same tokens without having kept its graphs."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small file system needs the right to mount")
    try:
        monkeypatch.setenv("PILOTAGE_COMPILE_CACHE", str(tmp_path))
        prompts = prompts_of((9,), seed=1)
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 32, "max_num_seqs": 1}
        options["additional_config"] = {"num_batched_tokens_buckets": [32]}
        said = ""
        try:
            with launch.engine(tiny("llama3"), **options) as llm:
                assert len(generate(llm, prompts, 4)[0].outputs[0].token_ids) == 4
        except PilotageError as error:
            said = str(error)
        assert not said or str(tmp_path) in said, "an error names the directory"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_torch_says_nan_for_a_nan_anywhere() -> None:
    """What the check of the weights rests on."""
    values = torch.zeros(1000)
    values[777] = float("nan")
    assert torch.isnan(torch.stack(torch.aminmax(values))).all()
