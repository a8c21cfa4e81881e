"""Load a server with everything that clients do to one, and check that nothing is lost, wrong, stuck or leaked.

    python tests/soak/soak.py --requests 2000 [--compiled] [--ranks 2] [--ngram 3]

Requests have random lengths and arrive side by side; many share prefixes; some are dropped by the client in the middle
of their stream, some have parameters that mean nothing, some are longer than the model. Afterwards: every request was
answered as it should be, greedy answers (a sample) equal Hugging Face's, no request is left in the scheduler, no page
is held, memory has not grown, and SIGTERM ends every process with code 0. The cache is too small for the load: requests
must have been preempted, with `--ngram` drafts must have stood and fallen.

Exit code 0 when all of that holds, 1 when not, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MAX_MODEL_LEN = 160
VOCAB = 256
PAGES = 40
SEQS = 6  # that run at once
# Greedy answers may differ where the two best logits are closer than this: then both tokens are right.
TIE = 1e-4
TIMEOUT_S = 120.0
# Of resident memory, from the second quarter of the run to its last.
ALLOWED_GROWTH_BYTES = 48 << 20
BAD: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"top_p": 1.7},
    {"max_tokens": -3},
    {"n": 0},
    {"prompt": [VOCAB * 100]},
    {"prompt": []},
    {"stop": 7},
    {"logprobs": 10_000},
    {"vllm_xargs": {"pilotage_force": [10**6]}},
    {"structured_outputs": {"regex": "(("}},
]


@dataclass(kw_only=True)
class Seen:
    """What happened; every string in `wrong` is one broken promise."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    greedy: list[tuple[list[int], list[int]]] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    slowest_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def prompt_of(draw: random.Random, prefixes: list[list[int]]) -> list[int]:
    """Return a prompt of 1 to 130 tokens; every second one starts like others do."""
    length = min(int(draw.expovariate(1 / 30)) + 1, 120)
    if draw.random() < 0.5:
        return (draw.choice(prefixes) + [draw.randrange(4, VOCAB) for _ in range(draw.randint(1, 10))])[:130]
    return [draw.randrange(4, VOCAB) for _ in range(length)]


async def one(index: int, url: str, model: str, client: Any, draw: random.Random, prefixes: Any, seen: Seen) -> None:
    """Send one request of a random kind and judge the answer."""
    kind = draw.choices(["greedy", "sampled", "stream", "dropped", "bad", "long"], [30, 20, 10, 20, 10, 10])[0]
    seen.counts[kind] += 1
    prompt = prompt_of(draw, prefixes)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": draw.randint(1, min(28, MAX_MODEL_LEN - len(prompt))),
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if kind == "sampled":
        body |= {"temperature": 0.9, "top_k": draw.choice([0, 5]), "seed": index, "n": draw.choice([1, 1, 2])}
        body["logprobs"] = draw.choice([None, 3])
    if kind == "bad":
        body |= draw.choice(BAD)
    if kind == "long":
        body["prompt"] = [7] * (MAX_MODEL_LEN + draw.randint(1, 400))
    await send(f"{kind} request {index}", kind, url, body, client, draw, seen)


async def crowd(url: str, model: str, client: Any, draw: random.Random, seen: Seen) -> None:
    """Send as many requests as run at once, each with the longest answer: there are not pages enough for them."""

    async def longest(index: int) -> None:
        prompt = [draw.randrange(4, VOCAB) for _ in range(8)]  # short, so that all are let in and then grow
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_MODEL_LEN - 8, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        seen.counts["greedy"] += 1
        await send(f"long answer {index}", "greedy", url, body, client, draw, seen)

    await asyncio.gather(*(longest(index) for index in range(SEQS)))


async def send(
    name: str, kind: str, url: str, body: dict[str, Any], client: Any, draw: random.Random, seen: Seen
) -> None:
    """Send a request and judge its answer."""
    start = time.monotonic()
    try:
        if kind in ("stream", "dropped"):
            await _stream(client, url, body, draw.randint(0, 6) if kind == "dropped" else None, seen)
        else:
            answer = await client.post(f"{url}/v1/completions", json=body)
            _judge(kind, body, answer, seen)
    except Exception as error:
        seen.wrong.append(f"{name}: {type(error).__name__}: {error}")
    seen.slowest_s = max(seen.slowest_s, time.monotonic() - start)


async def _stream(client: Any, url: str, body: dict[str, Any], leave_after: int | None, seen: Seen) -> None:
    """Read a stream to its end, or hang up after some events."""
    tokens: list[int] = []
    events = 0
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        if leave_after == 0:
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
            events += 1
            if events == leave_after:
                return
    if leave_after is None:
        if len(tokens) != body["max_tokens"]:
            seen.wrong.append(f"a stream had {len(tokens)} tokens of {body['max_tokens']}")
        seen.greedy.append((body["prompt"], tokens))


def _judge(kind: str, body: dict[str, Any], answer: Any, seen: Seen) -> None:
    if kind in ("bad", "long"):
        if answer.status_code not in (400, 422):
            seen.wrong.append(f"{kind} request was answered {answer.status_code}: {json.dumps(body)[:120]}")
        return
    if answer.status_code != 200:
        seen.wrong.append(f"{kind} request was answered {answer.status_code}: {answer.text[:200]}")
        return
    for choice in answer.json()["choices"]:
        if len(choice["token_ids"]) != body["max_tokens"]:
            seen.wrong.append(f"{kind}: {len(choice['token_ids'])} tokens of {body['max_tokens']}")
        if kind == "greedy":
            seen.greedy.append((body["prompt"], choice["token_ids"]))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it."""
    import psutil

    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def metric(text: str, name: str) -> float:
    """Return the sum of a metric over its labels.

    Raises:
        ValueError: /metrics has no such metric.
    """
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, flags=re.MULTILINE)
    if not found:
        raise ValueError(f"/metrics has no {name}")
    return sum(float(value) for value in found)


COUNTED = ("num_preemptions_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


async def load(
    url: str, model: str, pid: int, requests: int, seed: int, side_by_side: int, *, drafts: bool = False
) -> Seen:
    """Send all requests, then wait until the server is idle and read its metrics.

    Args:
        url, model, pid: of the server.
        requests: how many.
        seed: of their contents.
        side_by_side: requests that are open at a time.
        drafts: whether the server speculates.
    """
    import httpx

    draw = random.Random(seed)
    prefixes = [[draw.randrange(4, VOCAB) for _ in range(draw.choice([32, 64, 96]))] for _ in range(5)]
    seen = Seen()
    gate = asyncio.Semaphore(side_by_side)
    limits = httpx.Limits(max_connections=4 * side_by_side)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits) as client:

        async def guarded(index: int) -> None:
            async with gate:
                await one(index, url, model, client, random.Random(f"{seed}/{index}"), prefixes, seen)
                if index % max(requests // 80, 1) == 0:
                    seen.rss.append(resident_bytes(pid))

        await crowd(url, model, client, draw, seen)
        await asyncio.gather(*(guarded(index) for index in range(requests)))
        for _ in range(100):  # a dropped request leaves the scheduler in the step after
            text = (await client.get(f"{url}/metrics")).text
            left = [metric(text, f"vllm:num_requests_{state}") for state in ("running", "waiting")]
            used = metric(text, "vllm:kv_cache_usage_perc")
            if not any(left) and used == 0:
                break
            await asyncio.sleep(0.1)
        if any(left):
            seen.wrong.append(f"{left[0]:.0f} requests still run and {left[1]:.0f} still wait")
        if used:
            seen.wrong.append(f"{used:.2%} of the pages are still held")
        done = metric(text, "vllm:request_success_total")
        if done < seen.counts["greedy"] + seen.counts["sampled"] + seen.counts["stream"]:
            seen.wrong.append(f"/metrics counts only {done:.0f} finished requests")
        seen.metrics = {name: metric(text, f"vllm:{name}") for name in COUNTED[: 3 if drafts else 1]}
        if seen.metrics[COUNTED[0]] == 0:
            seen.wrong.append("no request was preempted: the load did not do what it should")
        if drafts and not 0 < seen.metrics[COUNTED[2]] < seen.metrics[COUNTED[1]]:
            seen.wrong.append(f"drafts did not both stand and fall: {seen.metrics}")
        if metric(text, "vllm:prefix_cache_hits_total") == 0:
            seen.wrong.append("no prefix was found in the cache: the load did not do what it should")
        if (await client.get(f"{url}/health")).status_code != 200:
            seen.wrong.append("/health is not 200 after the load")
    return seen


def growth(rss: list[int]) -> int:
    """Return by how many bytes the median of the last quarter exceeds that of the second."""
    quarter = len(rss) // 4
    return int(statistics.median(rss[-quarter:]) - statistics.median(rss[quarter : 2 * quarter])) if quarter else 0


def check_tokens(path: Path, sample: list[tuple[list[int], list[int]]]) -> list[str]:
    """Hold greedy answers against Hugging Face in fp32; return what differs."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wrong = []
    for prompt, tokens in sample:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        for step, token in enumerate(tokens):
            gap = float(logits[step].max() - logits[step, token])
            if gap > TIE:
                wrong.append(f"prompt of {len(prompt)} tokens: token {step} is {token}, worse by {gap:.4f} in logits")
                break
    return wrong


def run(
    model: Path,
    requests: int,
    *,
    seed: int = 0,
    side_by_side: int = 12,
    checked: int = 200,
    compiled: bool = False,
    ranks: int = 1,
    ngram: int = 0,
) -> dict[str, Any]:
    """Start a server on `model`, load it, stop it; return the counts and what was wrong.

    Args:
        model: a checkpoint.
        requests, seed, side_by_side: of `load`.
        checked: greedy answers that are held against Hugging Face.
        compiled: serve with compiled graphs, one for prefill and one for decode.
        ranks: tensor-parallel ranks.
        ngram: most tokens that are drafted by n-grams; 0 for no speculation.
    """
    from pilotage.serving import launch

    begin = time.monotonic()
    buckets = {"num_batched_tokens_buckets": [MAX_MODEL_LEN], "num_seqs_buckets": [SEQS]}
    # Fewer pages than the longest requests need together: requests are preempted and come back.
    arguments = ["--num-gpu-blocks-override", str(PAGES), "--disable-uvicorn-access-log"]
    if ngram:
        speculative = {"method": "ngram", "num_speculative_tokens": ngram, "prompt_lookup_min": 1}
        arguments += ["--speculative-config", json.dumps({**speculative, "prompt_lookup_max": 3})]
    with (
        tempfile.TemporaryDirectory(prefix="pilotage-soak-") as directory,
        launch.server(
            model,
            dtype="float32",
            enforce_eager=not compiled,
            tensor_parallel_size=ranks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=SEQS,
            additional_config=buckets if compiled else None,
            arguments=arguments,
            log=Path(directory) / "server.log",
        ) as server,
    ):
        seen = asyncio.run(load(server.url, server.model, server.pid, requests, seed, side_by_side, drafts=bool(ngram)))
        loaded_s = time.monotonic() - begin
        stop_s = _stop(server.pid, seen)
        log = server.log.read_text(errors="replace")
    if "Traceback (most recent call last)" in log:
        seen.wrong.append("the server's log has a traceback:\n" + log[log.index("Traceback (most recent") :][:1500])
    grown = growth(seen.rss)
    if grown > ALLOWED_GROWTH_BYTES:
        seen.wrong.append(f"memory grew by {grown / 2**20:.0f} MiB")
    sample = random.Random(seed).sample(seen.greedy, min(checked, len(seen.greedy)))
    seen.wrong += check_tokens(model, sample)
    return {
        "requests": dict(seen.counts),
        "metrics": seen.metrics,
        "checked_against_hf": len(sample),
        "slowest_s": round(seen.slowest_s, 2),
        "growth_mib": round(grown / 2**20, 1),
        "rss_mib": [round(value / 2**20) for value in seen.rss[:: max(len(seen.rss) // 8, 1)]],
        "stop_s": round(stop_s, 2),
        "seconds": round(loaded_s, 1),
        "wrong": seen.wrong,
    }


def _stop(pid: int, seen: Seen) -> float:
    """Ask the server to end; note it if a process stays, or if it takes long."""
    import psutil

    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    start = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=20)
    if alive:
        seen.wrong.append(f"{len(alive)} processes are left 20 s after SIGTERM")
    return time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--model", default="gemma3", help="name of a tiny model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="serve with compiled graphs")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ngram", type=int, default=0, help="most tokens drafted by n-grams")
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error("--requests must be at least 1")
    from pilotage.arch import tiny

    options = {"compiled": arguments.compiled, "ranks": arguments.ranks, "ngram": arguments.ngram}
    result = run(tiny.build(arguments.model), arguments.requests, seed=arguments.seed, **options)
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
