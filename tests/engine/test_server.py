"""`vllm serve` on this platform: the OpenAI endpoints, streaming, errors, and vLLM's own benchmark client."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import disagreement, prompts_of

from pilotage.serving import launch

pytestmark = pytest.mark.engine

# Requests to 127.0.0.1 never go through a proxy.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[launch.Server]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    with launch.server(
        tiny("gemma3"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=160,
        max_num_seqs=4,
        arguments=["--chat-template", str(template)],
    ) as it:
        # `launch.server` returns at the first 200 of /health: a request right after it is answered.
        assert post(it, "/v1/completions", prompt=[7], max_tokens=1)["usage"]["completion_tokens"] == 1
        yield it


def post(server: launch.Server, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{server.url}{path}",
        data=json.dumps({"model": server.model, **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with HTTP.open(request, timeout=120) as answer:
        text = answer.read().decode()
    return text if body.get("stream") else json.loads(text)


def test_completions_equal_the_reference(server: launch.Server, oracle: Any) -> None:
    (prompt,) = prompts_of((70,), seed=1)
    answer = post(
        server,
        "/v1/completions",
        prompt=prompt,
        max_tokens=10,
        temperature=0,
        ignore_eos=True,
        logprobs=2,
        return_token_ids=True,
    )
    (choice,) = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == 70
    assert disagreement(choice["token_ids"], oracle(Path(server.model)).greedy(prompt, 10)) is None
    assert len(choice["logprobs"]["token_logprobs"]) == 10


def test_streaming_gives_the_same_text(server: launch.Server) -> None:
    body: dict[str, Any] = {"prompt": "The tide turns at", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = post(server, "/v1/completions", **body)["choices"][0]["text"]
    events = [line[6:] for line in post(server, "/v1/completions", **body, stream=True).splitlines() if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_chat(server: launch.Server) -> None:
    answer = post(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Which way to the harbour?"}],
        max_tokens=5,
        temperature=1.0,
        seed=3,
    )
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"]["completion_tokens"] <= 5


def test_models_lists_what_is_served(server: launch.Server) -> None:
    with HTTP.open(f"{server.url}/v1/models", timeout=30) as answer:
        (model,) = json.loads(answer.read())["data"]
    assert model["id"] == server.model
    assert model["max_model_len"] == 160


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [7] * 161, "max_tokens": 1}, "160"),
        ({"prompt": [7], "vllm_xargs": {"pilotage_force": [9999]}}, "9999 is not in the vocabulary"),
    ],
)
def test_a_bad_request_is_answered_and_harms_nobody(server: launch.Server, body: dict[str, Any], said: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v1/completions", **body)
    assert caught.value.code == 400
    assert said in caught.value.read().decode()
    assert post(server, "/v1/completions", prompt=[7], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_second_server_on_the_port_is_refused(server: launch.Server) -> None:
    from pilotage.core.errors import BadInput

    with pytest.raises(BadInput, match=str(server.port)), launch.server(server.model, port=server.port):
        pass


@pytest.mark.slow
def test_vllm_bench_serve(server: launch.Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--model", server.model]
    command += ["--base-url", server.url, "--dataset-name", "random", "--num-prompts", "4", "--ignore-eos"]
    command += ["--random-input-len", "40", "--random-output-len", "8"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 32


def test_a_server_that_cannot_start_says_why(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    from pilotage.core.errors import WeightError

    path = tmp_path / "m"
    shutil.copytree(tiny("gemma3"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 93}))
    with pytest.raises(WeightError), launch.server(path, dtype="float32", enforce_eager=True, max_model_len=64):
        pass
