"""The benchmark's client, without a server."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def test_the_tokenizer_is_loaded_once_for_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.tokenizers
    from vllm.benchmarks import serve

    from pilotage.serving import bench_client

    loaded: list[str] = []
    given: list[Any] = []

    def load(name: str, **_: Any) -> object:
        loaded.append(name)
        return object()

    def main(args: Any) -> dict[str, Any]:
        tokenizer = serve.get_tokenizer(args.model, tokenizer_mode=args.tokenizer_mode, trust_remote_code=False)
        given.append(tokenizer)
        return {"completed": 1}

    bench_client._tokenizer.cache_clear()
    before = serve.get_tokenizer
    monkeypatch.setattr(vllm.tokenizers, "get_tokenizer", load)
    monkeypatch.setattr(serve, "main", main)
    try:
        for model in ("a", "a", "b"):
            assert bench_client.run(["--model", model]) == {"completed": 1, "prompts": []}
    finally:
        bench_client._tokenizer.cache_clear()
    assert loaded == ["a", "b"]
    assert given[0] is given[1] is not given[2]
    assert serve.get_tokenizer is before
