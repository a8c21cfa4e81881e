"""A server's processes end with the one that started them (the real server: tests/engine/test_failures.py)."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import psutil
import pytest

CODE = """
    import subprocess, sys, time
    from pilotage.serving import launch
    # A server with a child of its own, as vLLM's has.
    server = subprocess.Popen(["/bin/sh", "-c", "sleep 300 & wait"], start_new_session=True)
    with launch._leash(server):
        print(server.pid, flush=True)
        sys.stdin.readline()
        launch._stop(server)
    print("stopped", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_the_whole_group_ends(killed: bool) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CODE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None and starter.stdout is not None
    try:
        server = psutil.Process(int(starter.stdout.readline()))
        started = [*psutil.Process(starter.pid).children(recursive=True)]
        assert server in started and len(started) == 3  # the server, its child and who watches
        if killed:
            starter.kill()
        else:
            starter.stdin.write("\n")
            starter.stdin.flush()
            assert starter.stdout.readline() == "stopped\n"
        gone, alive = psutil.wait_procs(started, timeout=10)
        assert not alive and len(gone) == 3
    finally:
        starter.kill()
        starter.communicate()
