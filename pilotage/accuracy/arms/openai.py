"""A running OpenAI-compatible server, ours or not, as something that generates: tokens and the top of its logprobs."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pilotage.accuracy.forcing import TopLogprobs
from pilotage.core.errors import BadInput, Unavailable

_LOCAL = ("http://127.0.0.1", "http://localhost", "http://[::1]")
_ID_PREFIX = "token_id:"
# Log-probability by token, and what no other token exceeds.
Row = tuple[dict[int, float], float]


def post(url: str, body: Mapping[str, Any], *, timeout_s: float = 600.0) -> Any:
    """Send JSON and return the answer's JSON. `OPENAI_API_KEY` is sent where it is set.

    Raises:
        Unavailable: nobody answers.
        BadInput: the server refuses; its reason is in the message.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    # No proxy for this machine itself.
    handlers = [urllib.request.ProxyHandler({})] if url.startswith(_LOCAL) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise BadInput(f"refused with {error.code}: {said}", where=url) from error
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"no answer ({reason})", where=url, do="start the server or correct the address") from error
    except json.JSONDecodeError as error:
        raise BadInput("the answer is not JSON", where=url, do="name the root of an OpenAI-compatible API") from error


class Vocabulary:
    """Which id a returned token text stands for.

    Servers tell tokens as text. vLLM can be asked for ids; for others the tokenizer's own texts are looked up, and a
    text that several tokens share stands for none of them.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._ids: dict[str, int | None] = {}
        if tokenizer is None:
            return
        for index in range(len(tokenizer)):
            for text in {tokenizer.decode([index]), tokenizer.convert_ids_to_tokens(index)}:
                if text is not None:
                    self._ids[text] = index if text not in self._ids or self._ids[text] == index else None

    def id(self, text: str) -> int | None:
        """Return the id, or None where it cannot be told."""
        if text.startswith(_ID_PREFIX):
            return int(text.removeprefix(_ID_PREFIX))
        return self._ids.get(text)


class ServerGenerate:
    """A server's completions endpoint as `generate_fn`.

    Args:
        url: root of the server, e.g. "http://127.0.0.1:8000"; "/v1" is added where it is missing.
        model: the name that it serves under; None takes the first that it lists.
        steps: tokens to generate in one call.
        top_k: log-probabilities to ask for at each step.
        tokenizer: of the model, for servers that tell tokens as text only.
    """

    def __init__(
        self, url: str, model: str | None = None, *, steps: int, top_k: int = 5, tokenizer: Any | None = None
    ) -> None:
        root = url.rstrip("/")
        self.root = root if root.endswith("/v1") else f"{root}/v1"
        self.model, self.steps, self.top_k = model or self._first(), steps, top_k
        self.vocabulary = Vocabulary(tokenizer)

    def _first(self) -> str:
        handlers = [urllib.request.ProxyHandler({})] if self.root.startswith(_LOCAL) else []
        try:
            with urllib.request.build_opener(*handlers).open(f"{self.root}/models", timeout=30) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except (OSError, ValueError, LookupError) as error:
            raise Unavailable(f"it lists no model ({error})", where=self.root, do="name the model") from error

    def __call__(self, ids: Any) -> tuple[TopLogprobs, list[list[int]]]:
        """Continue prompts greedily; returns the top log-probabilities and the tokens said."""
        answers = [self._continued([int(token) for token in prompt]) for prompt in ids]
        # A prompt that ended early ends the batch there.
        steps = min(len(tokens) for tokens, _ in answers)
        return TopLogprobs.of([rows for _, rows in answers], steps), [tokens[:steps] for tokens, _ in answers]

    def _continued(self, prompt: Sequence[int]) -> tuple[list[int], list[Row]]:
        # vLLM knows ignore_eos; others leave it aside, and the retry loop goes on where they stop.
        scores = self._scores(prompt, max_tokens=self.steps, ignore_eos=True)
        tokens: list[int] = []
        rows: list[Row] = []
        for text, top, value in zip(scores["tokens"], scores["top_logprobs"], scores["token_logprobs"], strict=True):
            token = self.vocabulary.id(text)
            if token is None:
                break  # its text names no single token: what follows cannot be compared
            tokens.append(token)
            rows.append(self._row(top, token, value))
        return tokens, rows

    def _row(self, top: Mapping[str, float] | None, token: int, value: float) -> Row:
        top = {name: float(x) for name, x in (top or {}).items()}
        known = {number: x for name, x in top.items() if (number := self.vocabulary.id(name)) is not None}
        # The token itself comes even where it is not among the top; only the top bounds what was left out. A name
        # that stands for no single token hides one that may be as likely as it.
        hidden = [x for name, x in top.items() if self.vocabulary.id(name) is None]
        least = max([min(list(top.values())[: self.top_k], default=0.0), *hidden])
        return {**known, token: float(value)}, least

    def _scores(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "temperature": 0,
            "logprobs": self.top_k,
            "return_tokens_as_token_ids": True,
            **more,
        }
        answer = post(f"{self.root}/completions", body)
        scores = (answer.get("choices") or [{}])[0].get("logprobs")
        if not scores or not scores.get("top_logprobs"):
            raise BadInput(
                "the answer holds no log-probabilities", where=f"{self.root}/completions", do="serve with logprobs on"
            )
        return scores


class EchoingServer(ServerGenerate):
    """A server that scores its prompts: forced in one pass, with the reference's tokens as part of the prompt."""

    def forced(self, ids: Any, tokens: Tensor) -> TopLogprobs:
        """Return what the server says of the steps that say `tokens` [steps, batch].

        Raises:
            BadInput: it does not echo.
        """
        steps, found = tokens.shape[0], []
        for column, prompt in enumerate(ids):
            forced = tokens[:, column].tolist()
            scores = self._scores([*(int(token) for token in prompt), *forced], max_tokens=1, echo=True)
            tops, own = scores["top_logprobs"], scores["token_logprobs"]
            if len(tops) < len(prompt) + steps:
                raise BadInput("it does not echo the prompt's log-probabilities", where=self.root, do="use how='retry'")
            found.append(
                [self._row(tops[len(prompt) + i], token, own[len(prompt) + i]) for i, token in enumerate(forced)]
            )
        return TopLogprobs.of(found, steps)
