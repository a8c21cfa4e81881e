"""A server that is not ours: tokens told as text, a few log-probabilities a step, an end of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotage.accuracy.arms import hf
from pilotage.accuracy.arms.openai import EchoingServer, ServerGenerate, Vocabulary
from pilotage.accuracy.logits import logit_validation
from pilotage.core.errors import BadInput, Unavailable
from pilotage.core.nouns import Status

STEPS = 8
TOP = 4


class Foreign(BaseHTTPRequestHandler):
    """Answers completions as OpenAI's legacy endpoint does; knows no option of vLLM's."""

    model: Any
    tokenizer: Any
    echoes = True
    noise = 0.0
    asked: list[dict[str, Any]]

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "someone/else"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked.append(body)
        if body["model"] != "someone/else":
            return self._answer({"error": "no such model"}, 404)
        prompt = body["prompt"]
        if body.get("echo") and self.echoes:
            logits = self.model(torch.tensor([prompt])).logits[0]
            return self._scores([None, *self._noisy(logits)[:-1]], prompt)
        # It stops after 5 tokens, whatever was asked for.
        rows, said = [], []
        for _ in range(min(5, body["max_tokens"])):
            row = self._noisy(self.model(torch.tensor([[*prompt, *said]])).logits[0, -1:])[0]
            rows.append(row)
            said.append(int(row.argmax()))
        return self._scores(rows, said)

    def _noisy(self, logits: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(logits.abs().sum() * 1000) % 1000)
        return logits + self.noise * torch.randn(logits.shape, generator=generator)

    def _scores(self, rows: Any, tokens: list[int]) -> None:
        names = [self.tokenizer.convert_ids_to_tokens(token) for token in tokens]
        tops, own = [], []
        for row, token in zip(rows, tokens, strict=True):
            if row is None:
                tops.append(None)
                own.append(None)
                continue
            logprobs = row.log_softmax(-1)
            best = logprobs.topk(TOP)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops.append({self.tokenizer.convert_ids_to_tokens(index): value for index, value in pairs})
            own.append(float(logprobs[token]))
        scores = {"tokens": names, "top_logprobs": tops, "token_logprobs": own}
        self._answer({"choices": [{"index": 0, "text": "", "logprobs": scores}]})


@pytest.fixture(scope="module")
def parts(tiny: Callable[..., Path]) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    path = tiny("llama3")
    loader: Any = AutoTokenizer
    return hf.load(path, torch.float32), loader.from_pretrained(path)


@pytest.fixture
def foreign(parts: tuple[Any, Any]) -> Iterator[tuple[str, type[Foreign]]]:
    handler = type("Handler", (Foreign,), {"model": parts[0], "tokenizer": parts[1], "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


IDS = [[2, 41, 42, 43], [2, 99, 17]]


@pytest.mark.parametrize("kind", [ServerGenerate, EchoingServer])
def test_the_top_that_it_tells_is_judged(
    kind: type[ServerGenerate], foreign: tuple[str, type[Foreign]], parts: tuple[Any, Any]
) -> None:
    model, tokenizer = parts
    url, handler = foreign
    expected, _ = hf.generate(model, IDS, STEPS)
    source = kind(url, steps=STEPS, top_k=TOP, tokenizer=tokenizer)
    assert source.model == "someone/else"
    result = logit_validation(IDS, source, expected, {3: 1e-4, 50: 1e-4}, dtype=torch.float32)
    statuses = {verdict.metric: verdict.status for verdict in result.verdicts}
    assert statuses == {
        "top_3_error": Status.PASS,
        "top_50_error": Status.NOT_MEASURED,
        "divergence_difference": Status.PASS,
        "rest": Status.NOT_MEASURED,
    }
    assert result.measured is Status.PASS and result.status is Status.NOT_MEASURED
    assert len(result.rows) == STEPS * len(IDS)
    # The retry loop goes on where the server stops by itself.
    assert result.calls == (1 if kind is EchoingServer else 2)
    assert handler.asked[0]["logprobs"] == TOP


def test_a_wrong_server_fails_whichever_way_it_is_asked(
    foreign: tuple[str, type[Foreign]], parts: tuple[Any, Any]
) -> None:
    model, tokenizer = parts
    url, handler = foreign
    handler.noise = 1.0
    expected, _ = hf.generate(model, IDS, STEPS)
    for kind in (ServerGenerate, EchoingServer):
        source = kind(url, steps=STEPS, top_k=TOP, tokenizer=tokenizer)
        assert logit_validation(IDS, source, expected, {3: 0.01}, dtype=torch.float32).measured is Status.FAIL


def test_refusals_are_one_clear_line(foreign: tuple[str, type[Foreign]], parts: tuple[Any, Any]) -> None:
    url, handler = foreign
    with pytest.raises(BadInput, match="404"):
        ServerGenerate(url, "other", steps=2, tokenizer=parts[1])(IDS)
    handler.echoes = False
    tokens = torch.tensor([[5, 6]] * 6)
    with pytest.raises(BadInput, match="does not echo"):
        EchoingServer(url, steps=6, tokenizer=parts[1]).forced(IDS, tokens)
    with pytest.raises(Unavailable, match="lists no model"):
        ServerGenerate("http://127.0.0.1:9", steps=2)


def test_texts_that_several_tokens_share_stand_for_none_of_them() -> None:
    class Tokenizer:
        names = ("a", "b", "b", "Ġc")

        def __len__(self) -> int:
            return 4

        def decode(self, ids: list[int]) -> str:
            return self.names[ids[0]].replace("Ġ", " ")

        def convert_ids_to_tokens(self, index: int) -> str:
            return self.names[index]

    vocabulary = Vocabulary(Tokenizer())
    assert [vocabulary.id(text) for text in ("a", "b", " c", "Ġc", "?", "token_id:7")] == [0, None, 3, 3, None, 7]
