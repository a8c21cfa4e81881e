"""The same requests through `vllm serve`: logits recorded in the server's engine, and the tokens it makes of text."""

from __future__ import annotations

import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pilotage.accuracy.invariance import rows
from pilotage.accuracy.invariance.rows import Rows
from pilotage.core.errors import PilotageError
from pilotage.serving.drive import FORCE_KEY, Request, Schedule
from pilotage.serving.launch import Server

# The only way to reach the workers of a server; the server listens on this machine alone.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
TEXT = "The first is to know where the bottom is: 3,333 metres? It's 14 m + 77 cm, said the pilot."
CHAT = [{"role": "user", "content": TEXT}]
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine itself


def _post(server: Server, path: str, body: Mapping[str, Any], *, request_id: str | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    if request_id is not None:
        headers["X-Request-Id"] = request_id
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
    try:
        with _DIRECT.open(request, timeout=600) as answer:
            said = answer.read()
    except urllib.error.HTTPError as error:
        raise PilotageError(f"{error.code}: {error.read().decode(errors='replace')[:300]}", where=path) from error
    return json.loads(said) if said else None


def _complete(server: Server, number: int, request: Request) -> None:
    forced = list(request.tokens[request.prompt :])
    body = {
        "model": server.model,
        "prompt": list(request.tokens[: request.prompt]),
        "max_tokens": len(forced),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "vllm_xargs": {FORCE_KEY: forced},
    }
    answer = _post(server, "/v1/completions", body, request_id=str(number))
    if answer["choices"][0]["token_ids"] != forced:
        raise PilotageError(f"request {number} did not follow its forced tokens", where="vllm serve")


def numbers(request_ids: Sequence[str]) -> list[int]:
    """Return the number that was given to each request: vLLM makes `cmpl-3-0-suffix` of 3."""
    return [int(name.split("-")[1]) for name in request_ids]


def run(server: Server, schedule: Schedule, positions: Sequence[int]) -> Rows:
    """Send the requests of a schedule, one by one or all at once, and read what the server's engine recorded.

    Raises:
        PilotageError: a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="pilotage-rows-") as directory:
        _post(server, "/reset_prefix_cache", {})
        _post(server, "/collective_rpc", {"method": "record_start", "args": [directory, list(positions)]})
        try:
            if schedule.one_by_one:
                for number, request in enumerate(schedule.requests):
                    if schedule.forget:
                        _post(server, "/reset_prefix_cache", {})
                    _complete(server, number, request)
            else:
                with ThreadPoolExecutor(len(schedule.requests)) as pool:
                    list(pool.map(lambda item: _complete(server, *item), enumerate(schedule.requests)))
        finally:
            stopped = _post(server, "/collective_rpc", {"method": "record_stop"})
        return rows.read(Path(directory), stopped["results"][0], number=numbers)


def tokens(server: Server, *, chat: bool) -> dict[str, list[int]]:
    """Return the ids that the server makes of `TEXT`, as a completion and, where there is a template, as a chat."""
    common = {"model": server.model, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
    found = {"completion": _post(server, "/v1/completions", {**common, "prompt": TEXT})["choices"][0]}
    if chat:
        found["chat"] = _post(server, "/v1/chat/completions", {**common, "messages": CHAT})
    return {name: list(answer["prompt_token_ids"]) for name, answer in found.items()}


def offline_tokens(llm: Any) -> dict[str, list[int]]:
    """Return the ids that `LLM.generate` and, where there is a template, `LLM.chat` make of `TEXT`."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0)
    found = {"completion": list(llm.generate([TEXT], params, use_tqdm=False)[0].prompt_token_ids)}
    if getattr(llm.get_tokenizer(), "chat_template", None):
        found["chat"] = list(llm.chat(CHAT, params, use_tqdm=False)[0].prompt_token_ids)
    return found
