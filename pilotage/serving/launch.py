"""Start an engine in this process, or a server in its own, with settings that suit this target.

Both make sure that vLLM really runs on this platform, and turn a failed start into one clear error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotage.core import errors
from pilotage.core.environment import environment
from pilotage.core.errors import BadInput, PilotageError, Unavailable

if TYPE_CHECKING:
    from vllm import LLM

_ERROR_FILE = "PILOTAGE_ERROR_FILE"
LOCALHOST = "127.0.0.1"


def _quiet() -> None:
    """Keep vLLM to its errors unless the user chose a level; must run before vllm is imported.

    Its warnings are about its own compiler and seeds, which play no part on this target.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Standard output belongs to the results of whoever calls us; vLLM would log there.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def require_platform() -> None:
    """Raise unless vLLM in this process runs on the pilotage platform.

    Raises:
        Unavailable: vLLM is not installed, or another platform is active.
    """
    _quiet()
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise Unavailable("vllm is not installed", do="run `make setup`") from error
    if type(current_platform).__name__ != "PilotagePlatform":
        raise Unavailable(
            f"vLLM runs on {type(current_platform).__name__}, not on the pilotage platform",
            where="vllm.platforms",
            do="unset PILOTAGE_DISABLE and VLLM_PLUGINS, and install pilotage in this environment",
        )


def _reported(path: Path) -> PilotageError | None:
    """Return the error that a worker left in `path`."""
    try:
        said = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    kind = getattr(errors, said["kind"], PilotageError)
    found: PilotageError = kind(said["what"], where=said["where"], do=said["do"])
    return found


@contextlib.contextmanager
def engine(
    model: str | Path,
    *,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    additional_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """Yield a `vllm.LLM` on this platform; on leaving, its memory is given back.

    With one rank the engine lives in this process, so its errors arrive as they are and nothing outlives the block.

    Args:
        model: directory of a checkpoint.
        dtype: "bfloat16" or "float32".
        max_model_len: longest request in tokens; None takes the model's own.
        max_num_seqs: requests that run at once.
        tensor_parallel_size: ranks, each a process of its own when there are several.
        enforce_eager: run without compiling.
        additional_config: settings of `TargetConfig`, without the section name.
        **options: further arguments of `vllm.LLM`.

    Raises:
        PilotageError: whatever kept the engine from starting.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if tensor_parallel_size > 1:
        # A forked worker hangs at its first parallel loop if this process has run one.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotage-engine-")))
        report = directory / "error.json"
        with environment({**variables, _ERROR_FILE: str(report)}):
            require_platform()
            from vllm import LLM, envs

            # An engine before this one made vLLM keep its environment as it was then; workers would be forked.
            envs.disable_envs_cache()
            settings: dict[str, Any] = {
                "model": str(model),
                "dtype": dtype,
                "max_num_seqs": max_num_seqs,
                "tensor_parallel_size": tensor_parallel_size,
                "enforce_eager": enforce_eager,
                "seed": 0,
                "disable_log_stats": True,
                **options,
            }
            if max_model_len is not None:
                settings["max_model_len"] = max_model_len
            if additional_config:
                settings["additional_config"] = {"pilotage": dict(additional_config)}
            llm = None
            try:
                llm = LLM(**settings)
            except PilotageError:
                raise
            except Exception as error:
                if (said := _reported(report)) is not None:
                    raise said from None
                if (own := _cause(error)) is not None:
                    raise own from None
                raise
            finally:
                if llm is None:
                    _release()
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            _release()


def _cause(error: BaseException) -> PilotageError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PilotageError):
        cause = cause.__cause__ or cause.__context__
    return cause


def _release() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    from pilotage import parallel

    parallel.set_tp_group(None)
    parallel.set_parallel_layout(None)
    cleanup_dist_env_and_memory()
    gc.collect()


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running OpenAI-compatible server.

    Attributes:
        url: e.g. "http://127.0.0.1:8123".
        model: the name that requests use.
        port: where it listens.
        pid: of the server's process, which leads a process group of its own.
        start_s: seconds until it answered.
        log: file with everything it printed.
        command: how it was started.
    """

    url: str
    model: str
    port: int
    pid: int
    start_s: float
    log: Path
    command: list[str]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise unless this process could listen on `port`.

    Raises:
        BadInput: the port is in use or not allowed.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOCALHOST, port))
        except OSError as error:
            raise BadInput(
                f"cannot listen on it ({error.strerror})",
                where=f"port {port}",
                do="stop what uses it or choose another port",
            ) from error


# What vLLM's logger puts before each line: the process, and the level, time and place of an error.
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) ?)?(ERROR [^\]]*\] ?)?")
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Refused|Timeout)\b|^[a-z_]\w*(\.\w+)+: ")


@contextlib.contextmanager
def server(
    model: str | Path,
    *,
    port: int | None = None,
    dtype: str = "bfloat16",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    tensor_parallel_size: int = 1,
    enforce_eager: bool = False,
    additional_config: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    entry: Sequence[str] = ("-m", "vllm.entrypoints.cli.main"),
    log: Path | None = None,
    timeout_s: float = 900.0,
) -> Iterator[Server]:
    """Run `vllm serve` on 127.0.0.1 until the block is left.

    Args:
        model: directory of a checkpoint.
        port: None takes a free one.
        dtype, max_model_len, max_num_seqs, tensor_parallel_size, enforce_eager: as for `engine`.
        additional_config: settings of `TargetConfig`, without the section name.
        arguments: further arguments of `vllm serve`.
        environment: further environment variables.
        python: interpreter of the environment to serve from; another one may hold another vLLM.
        entry: what follows the interpreter to get the `vllm` command.
        log: where its output goes; None for a temporary file.
        timeout_s: how long it may take to answer.

    Raises:
        BadInput: the port cannot be used.
        PilotageError: the server did not start; why, from its log, is in the message.
    """
    port = port if port is not None else free_port()
    require_free(port)
    command = [python, *entry, "serve", str(model)]
    command += ["--host", LOCALHOST, "--port", str(port), "--dtype", dtype]
    command += ["--max-num-seqs", str(max_num_seqs), "--tensor-parallel-size", str(tensor_parallel_size)]
    command += ["--max-model-len", str(max_model_len)] if max_model_len is not None else []
    command += ["--enforce-eager"] if enforce_eager else []
    if additional_config:
        command += ["--additional-config", json.dumps({"pilotage": dict(additional_config)})]
    command += arguments
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotage-server-")))
        report, log = directory / "error.json", log or directory / "server.log"
        variables = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        variables |= {_ERROR_FILE: str(report), **(environment or {})}
        start = time.perf_counter()
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )
        stack.enter_context(_leash(process))
        url = f"http://{LOCALHOST}:{port}"
        try:
            _wait(process, url, timeout_s, log, report)
            yield Server(
                url=url,
                model=str(model),
                port=port,
                pid=process.pid,
                start_s=time.perf_counter() - start,
                log=log,
                command=command,
            )
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[bytes], url: str, timeout_s: float, log: Path, report: Path) -> None:
    deadline = time.monotonic() + timeout_s
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for this machine itself
    while True:
        try:
            with direct.open(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        died = process.poll() is not None
        if died or time.monotonic() > deadline:
            if (said := _reported(report)) is not None:
                raise said
            lines = log.read_text(errors="replace").splitlines()
            own = [line for line in lines if line.startswith("pilotage: ")]
            if own:
                raise Unavailable(own[-1].removeprefix("pilotage: "), where="vllm serve")
            what = f"ended with code {process.returncode}" if died else f"did not answer within {timeout_s:.0f} s"
            raise Unavailable(f"{what}; from its log:\n" + "\n".join(cause(lines)), where="vllm serve")
        time.sleep(0.2)


def cause(lines: Sequence[str]) -> list[str]:
    """Return what a log says about why a server ended: its first traceback, or its end.

    The first one, because the processes that wait for the one that failed add tracebacks of their own, which only say
    that it failed.
    """
    plain = [_PREFIX.sub("", line) for line in lines]
    start = next((n for n, line in enumerate(plain) if line.startswith("Traceback (most recent")), None)
    if start is None:
        return list(lines[-25:])
    end = next((n for n in range(start + 1, len(plain)) if _ERROR.match(plain[n])), len(plain) - 1)
    return plain[max(start, end - 14) : end + 6]


@contextlib.contextmanager
def _leash(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a server and everything it started when this process is gone without having stopped it, as after SIGKILL.

    A shell waits for the end of a pipe whose other end only we have.
    """
    group = f"-{process.pid}"
    patience = f"for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; kill -0 {group} || exit; done"
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", f"read -r line; kill -TERM {group}; {patience}; kill -KILL {group}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and everything it started."""
    for how, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
