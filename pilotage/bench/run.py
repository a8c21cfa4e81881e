"""Measure every arm in one run, in turns, and put the result together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotage.bench import idle, memory
from pilotage.bench.arms import Asked, HFArm, Peer, ServerArm, client_arguments, find_peer
from pilotage.bench.child import Child
from pilotage.bench.loads import Load, choose
from pilotage.bench.measurement import MEMORY, PEAK_RSS, Values, ratios

OURS, HF = "pilotage", "hf"
SEED = 20
_PROFILED = ("decode-x1", "decode-x8", "prefill-1024")
# Room for the same requests; its own default takes half of the machine.
_PEER_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What was measured.

    Attributes:
        model: as on the command line.
        arms: arm -> load -> metric -> one value a repeat.
        ratios: of the arms, see `measurement.ratios`.
        where_time_goes: [{"load", "part", "ms", "share"}] of one engine step.
        server_ms: load -> milliseconds between tokens that the engine step does not explain: HTTP, JSON, text.
        loads: what each load is, in words.
        commands: how to repeat it by hand.
        machine, versions: where and with what.
    """

    model: str
    arms: dict[str, Values]
    ratios: list[dict[str, Any]]
    where_time_goes: list[dict[str, Any]]
    loads: dict[str, str]
    commands: list[str]
    machine: dict[str, Any]
    versions: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class _Arms:
    """The running arms and what they have yielded.

    Attributes:
        servers, hf: the arms.
        pids: of each arm.
        others: pid of the client.
        never_idle: servers that kept the processor busy between their turns.
        values: arm -> load -> metric -> one value a repeat.
    """

    servers: dict[str, ServerArm] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)
    never_idle: set[str] = field(default_factory=set)
    hf: HFArm | None = None
    values: dict[str, Values] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))

    def keep(self, arm: str, load: str, found: dict[str, float]) -> None:
        for metric, value in found.items():
            self.values[arm][load].setdefault(metric, []).append(value)

    def repeat(self, load: Load, seed: int, *, keep: bool, step: Callable[[str], None]) -> None:
        """Let every arm run the load once, with the same prompts."""
        asked: Asked | None = None
        for name, server in self.servers.items():
            step(f"{name}: {load.name}")
            self._settle(name)
            found, asked = server.measure(load, seed)
            if keep:
                self.keep(name, load.name, found)
        if self.hf is not None and asked is not None:
            step(f"{HF}: {load.name}")
            self._settle(HF)
            found = self.hf.measure(load, asked)
            if keep:
                self.keep(HF, load.name, found)

    def _settle(self, turn: str) -> None:
        """Wait until nothing of the turn before is at work any more; arms that never rest are remembered."""
        if idle.wait([*self.pids.values(), *self.others]) is None:
            busy = [name for name, pid in self.pids.items() if name != turn and idle.wait([pid], patience_s=0) is None]
            self.never_idle.update(busy)


def bench(
    model: str,
    *,
    loads: str | None = None,
    repeats: int = 2,
    peer_python: str | None = None,
    peer_environment: Sequence[str] = (),
    hf: bool = True,
    profile: bool = True,
    port: int | None = None,
    logs: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    bar: Callable[[int], contextlib.AbstractContextManager[Callable[[str], None]]] | None = None,
) -> Bench:
    """Benchmark a model on the real server, against Hugging Face and another vLLM if there is one.

    Args:
        model: MODEL of the command line.
        loads: names of `loads.LOADS`, comma-separated; None for all that fit.
        repeats: of every load, all arms in turns.
        peer_python: interpreter of another vLLM environment.
        peer_environment: KEY=VALUE settings of the peer's server.
        hf: measure Hugging Face.
        profile: take a step apart.
        port: of our server; None for a free one.
        logs: directory for the logs; None for a temporary one.
        say: told what is going on.
        bar: given the number of measurements, yields a function that is told of each.

    Raises:
        PilotageError: whatever keeps an arm from being measured; nothing is left running.
    """
    from pilotage.arch import source
    from pilotage.serving import launch, settings

    if port is not None:
        launch.require_free(port)
    peer = find_peer(peer_python) if peer_python is not None else None
    path = source.resolve(model)
    shared = settings.shared(path)
    chosen = choose(loads, max_model_len=shared["max_model_len"])
    shared = room_for(chosen, shared)
    commands: list[str] = []
    arms = _Arms()
    versions = _versions(peer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stopped_by_sigterm())
        directory = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotage-bench-")))
        directory.mkdir(parents=True, exist_ok=True)
        # All of them spend their first seconds importing, side by side.
        taken_apart = None
        if profile and any(load.name in _PROFILED for load in chosen):
            own = contextlib.ExitStack()
            taken_apart = stack.enter_context(own)
            profiled = own.enter_context(Child("pilotage.bench.step_profile", directory / "profile.log", [str(path)]))
        client = stack.enter_context(Child("pilotage.serving.bench_client", directory / "client.log"))
        arms.others.append(client.pid)
        if hf:
            runner = Child("pilotage.bench.hf_runner", directory / "hf.log", [str(path), shared["dtype"]])
            arms.hf, arms.pids[HF] = HFArm(stack.enter_context(runner)), runner.pid
        for name, options in servers(shared, port, peer, peer_environment).items():
            say(f"starting the server of {name}")
            server = stack.enter_context(launch.server(path, log=directory / f"{name}.log", **options))
            arms.keep(name, "start", {"seconds": server.start_s})
            arms.servers[name] = ServerArm(client, url=server.url, model=server.model)
            arms.pids[name] = server.pid
            commands.append(_shown(options.get("environment"), server.command))
            commands += [
                _shown(
                    None, ["vllm", "bench", "serve", *client_arguments(load, url=server.url, model=model, seed=SEED)]
                )
                for load in chosen
            ]
        if arms.hf is not None:
            versions[HF] = arms.hf.describe()
            commands.append(f"python -m pilotage.bench.hf_runner {path} {shared['dtype']}")
        rows: list[dict[str, Any]] = []
        if taken_apart is not None:
            say("taking a step apart")
            rows = _profile(profiled, chosen)
            taken_apart.close()
        _measure(arms, chosen, repeats, bar)
        for name, pid in arms.pids.items():
            peak = memory.peak_rss_mib(pid)
            if peak is not None:
                arms.keep(name, MEMORY, {PEAK_RSS: peak})
    values = {name: {load: dict(found) for load, found in arm.items()} for name, arm in arms.values.items()}
    return Bench(
        model=model,
        arms=values,
        ratios=ratios(values, OURS),
        where_time_goes=rows + _outside(rows, values[OURS]),
        loads={load.name: load.about for load in chosen},
        commands=commands,
        machine=_machine() | {"never_idle": sorted(arms.never_idle)},
        versions=versions,
    )


def room_for(chosen: Sequence[Load], shared: dict[str, Any]) -> dict[str, Any]:
    """Let the server run as many requests at once as the loads ask for; its other graphs stay those of `shared`."""
    at_once = max(load.concurrency for load in chosen)
    if at_once <= shared["max_num_seqs"]:
        return shared
    config = shared["additional_config"]
    more = [size for size in (32,) if shared["max_num_seqs"] < size < at_once]  # a large batch shrinks as answers end
    return {
        **shared,
        "max_num_seqs": at_once,
        "additional_config": {**config, "num_seqs_buckets": [*config["num_seqs_buckets"], *more, at_once]},
    }


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Leave through the usual way when told to end, so that no server stays behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signum: int, frame: Any) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(arms: _Arms, chosen: list[Load], repeats: int, bar: Any) -> None:
    measured = len(arms.servers) + (arms.hf is not None)
    open_bar = bar or (lambda total: contextlib.nullcontext(lambda text: None))
    with open_bar(measured * len(chosen) * (repeats + 1)) as step:
        for repeat in range(repeats + 1):
            for load in chosen:
                # The first round only warms up: every arm allocates, and some compile, when first asked.
                asked = load if repeat else dataclasses.replace(load, output_len=min(load.output_len, 4), spread=0.0)
                arms.repeat(asked, SEED + repeat, keep=repeat > 0, step=step)


def servers(
    shared: dict[str, Any], port: int | None, peer: Peer | None, peer_environment: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the arguments of `launch.server` for each server arm."""
    # Prompts do not repeat, so the prefix cache could only cost time; off for both.
    arguments = ["--no-enable-prefix-caching"]
    found: dict[str, dict[str, Any]] = {OURS: {**shared, "port": port, "arguments": arguments}}
    if peer is not None:
        environment = {**_PEER_ENVIRONMENT, **dict(pair.split("=", 1) for pair in peer_environment)}
        options = {key: value for key, value in shared.items() if key != "additional_config"}
        found[peer.name] = {
            **options,
            "arguments": arguments,
            "python": peer.python,
            "entry": peer.entry,
            "environment": environment,
        }
    return found


def _profile(child: Child, chosen: list[Load]) -> list[dict[str, Any]]:
    loads = [
        {
            "name": load.name,
            "input_len": load.input_len,
            "output_len": min(load.output_len, 32),
            "concurrency": load.concurrency,
        }
        for load in chosen
        if load.name in _PROFILED
    ]
    rows: list[dict[str, Any]] = child.ask({"loads": loads})["rows"]
    return rows


def _outside(rows: Sequence[dict[str, Any]], ours: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """What the client saw and the engine's step does not explain: HTTP, JSON, text, the other process."""
    found = []
    for load in dict.fromkeys(row["load"] for row in rows):
        metric = "itl_ms" if "itl_ms" in ours.get(load, {}) else "ttft_ms"
        values = ours.get(load, {}).get(metric)
        if values:
            engine_ms = sum(row["ms"] for row in rows if row["load"] == load)
            seen_ms = min(values)
            found.append(
                {
                    "load": load,
                    "part": "outside the engine's step (HTTP, text, waiting)",
                    "ms": max(0.0, seen_ms - engine_ms),
                    "share": None,
                }
            )
    return found


def _shown(environment: dict[str, str] | None, command: Sequence[str]) -> str:
    settings = [f"{key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
    return " ".join([*settings, shlex.join(command)])


def _versions(peer: Peer | None) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("pilotage", "vllm", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if peer is not None:
        found[peer.name] = peer.version
    return found


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = platform.processor() or platform.machine()
    memory_mib = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        memory_mib = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cpu": name, "cores": cores, "memory_mib": memory_mib, "load_average": load, "system": sys.platform}
