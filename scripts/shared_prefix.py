"""Throughput of requests that share a prefix, with the prefix cache on and off.

python scripts/shared_prefix.py tiny:gemma3 --prefix 448 --tail 16 --requests 24
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any


def measure(model: str, prompts: list[list[int]], new: int, *, caching: bool) -> tuple[float, int]:
    """Return (requests a second, prompt tokens found in the cache) of `prompts`, served once after a warm-up."""
    from vllm import SamplingParams

    from pilotage.arch import source
    from pilotage.serving import launch

    longest = max(len(prompt) for prompt in prompts) + new
    options: dict[str, Any] = {"max_model_len": longest + 32, "max_num_seqs": 4, "enforce_eager": True}
    with launch.engine(source.resolve(model), enable_prefix_caching=caching, **options) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(requests[:1], sampling, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(requests[1:], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
    return len(outputs) / seconds, sum(output.num_cached_tokens or 0 for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=448, help="tokens that all prompts begin with")
    parser.add_argument("--tail", type=int, default=16, help="tokens of their own")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--new", type=int, default=4, help="tokens generated for each")
    arguments = parser.parse_args()
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(4, 300) for _ in range(count)]

    shared = tokens(arguments.prefix)
    prompts = [shared + tokens(arguments.tail) for _ in range(arguments.requests + 1)]
    found = {}
    for caching in (False, True):
        found[caching], cached = measure(arguments.model, prompts, arguments.new, caching=caching)
        state = "on " if caching else "off"
        print(
            f"prefix cache {state}: {found[caching]:7.2f} requests/s, {cached} prompt tokens from the cache", flush=True
        )
    print(f"ratio: {found[True] / found[False]:.2f}")


if __name__ == "__main__":
    main()
