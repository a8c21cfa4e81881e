"""`vllm bench serve`, several times in one process: `python -m pilotage.serving.bench_client`.

Importing vLLM takes several seconds; a benchmark of many short repeats would spend most of its time there. This runs
the very function behind the command with the arguments of the command, one JSON document a line:
`{"arguments": [...]}` in, the command's result and the prompts it sent out.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Do what `vllm bench serve` does with these arguments.

    Returns:
        The command's result, with the times of each request, and `prompts`: what was sent, as text.
    """
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    sent: list[str] = []
    benchmark = serve.benchmark

    async def kept(**settings: Any) -> Any:
        sent.extend(request.prompt for request in settings["input_requests"])
        return await benchmark(**settings)

    load = serve.get_tokenizer
    serve.benchmark, serve.get_tokenizer = kept, _tokenizer
    try:
        result: dict[str, Any] = serve.main(parser.parse_args([*arguments, "--save-detailed"]))
    finally:
        serve.benchmark, serve.get_tokenizer = benchmark, load
    return {**result, "prompts": sent}


@functools.cache
def _tokenizer(name: str, **options: Any) -> Any:
    """Load a tokenizer once: the command would load it for every run, and keep the memory of all of them."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(name, **options)


def main() -> None:
    """Answer questions on standard input until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the command prints tables; they go to the log
    for line in sys.stdin:
        try:
            reply = run(json.loads(line)["arguments"])
        except SystemExit as error:
            reply = {"error": f"vllm bench serve left with code {error.code}"}
        except Exception as error:  # the parent must learn of it, whatever it is
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
