"""From the command to the first token, with graphs in the compile cache: this server's and another vLLM's, in turn.

    python scripts/measure_start.py gemma3-270m --peer-python OTHER/bin/python --rounds 3

Nothing else of ours runs meanwhile. The first round fills caches and does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def first_token(path: Any, options: Mapping[str, Any]) -> float:
    """Start a server, ask for one token, and stop it; returns the seconds until the token was there."""
    from pilotage.serving import launch

    start = time.perf_counter()
    with launch.server(path, **options) as server:
        body = {"model": server.model, "prompt": [2, 105, 2364, 107], "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with DIRECT.open(request, timeout=120) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 1
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer-python", required=True, help="bin/python of the other environment")
    parser.add_argument("--peer-env", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from pilotage.arch import source
    from pilotage.bench.arms import find_peer
    from pilotage.bench.run import OURS, servers
    from pilotage.serving import settings

    path = source.resolve(arguments.model)
    peer = find_peer(arguments.peer_python)
    arms = servers(settings.shared(path), None, peer, arguments.peer_env)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(arguments.rounds + 1):
        for name, options in arms.items():
            took = first_token(path, options)
            print(f"{name}: {took:.1f} s{'' if number else ' (not counted)'}", flush=True)
            if number:
                seconds[name].append(took)
    ratios = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[peer.name], strict=True)]
    print(json.dumps({"seconds": seconds, "ours_over_theirs": statistics.median(ratios), "each": ratios}))


if __name__ == "__main__":
    main()
