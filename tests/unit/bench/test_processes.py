"""Children that answer questions, peak memory, and taking a step apart."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pilotage.bench import idle, memory
from pilotage.bench.child import Child
from pilotage.bench.step_profile import Stopwatch, classify
from pilotage.core.errors import Unavailable
from pilotage.kernels import cpu


@pytest.fixture
def child_module(tmp_path: Path) -> dict[str, str]:
    """A module that answers; the environment in which a child finds it."""
    (tmp_path / "answering.py").write_text(
        textwrap.dedent("""
            import os, sys
            from pilotage.bench.child import serve

            def answer(question):
                print("chatter")  # a library that prints
                if question.get("die"):
                    print("the reason", file=sys.stderr, flush=True)
                    os._exit(3)
                return {"double": 2 * question["number"]}

            serve(answer)
        """)
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_answers_are_apart_from_what_is_printed(child_module: dict[str, str], tmp_path: Path) -> None:
    with Child("answering", tmp_path / "log", environment=child_module) as child:
        assert child.ask({"number": 4}) == {"double": 8}
        child.send({"number": 1})
        assert child.receive() == {"double": 2}
        pid = child.pid
    assert "chatter" in (tmp_path / "log").read_text()
    assert not Path(f"/proc/{pid}").exists()


def test_a_failed_question_says_why(child_module: dict[str, str], tmp_path: Path) -> None:
    with Child("answering", tmp_path / "log", environment=child_module) as child:
        with pytest.raises(Unavailable, match="KeyError: 'number'"):
            child.ask({})
        assert child.ask({"number": 1}) == {"double": 2}  # it goes on


def test_a_dead_child_is_reported_with_its_log(child_module: dict[str, str], tmp_path: Path) -> None:
    with (
        Child("answering", tmp_path / "log", environment=child_module) as child,
        pytest.raises(Unavailable, match=r"ended with code 3(.|\n)*the reason"),
    ):
        child.ask({"die": True})


def test_peak_memory_counts_descendants_and_outlives_the_peak() -> None:
    code = (
        "import subprocess, sys, time; x = bytearray(80 << 20); del x; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; y = bytearray(60 << 20); print(1, flush=True); "
        "time.sleep(60)'], stdout=subprocess.PIPE); p.stdout.readline(); print(1, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        pids = memory.tree(process.pid)
        assert len(pids) == 2 and pids[0] == process.pid
        peak = memory.peak_rss_mib(process.pid)
        assert peak is not None and 140 < peak < 300
    finally:
        for pid in reversed(memory.tree(process.pid)):
            subprocess.run(["kill", str(pid)], check=False)
        process.wait()
    assert memory.peak_rss_mib(process.pid) is None


class Thing:
    def work(self, seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    def step(self) -> str:
        self.work(0.01)
        return self.work(0.01)


def test_the_stopwatch_sums_by_step_and_lets_go() -> None:
    thing, watch = Thing(), Stopwatch()
    watch.watch(thing, "work", lambda seconds: f"work {seconds}")
    watch.watch(thing, "step", "step", ends_step=True)
    assert thing.step() == "done"
    thing.step()
    assert len(watch.steps) == 2 and set(watch.steps[0]) == {"work 0.01", "step"}
    assert watch.steps[0]["step"] >= watch.steps[0]["work 0.01"] >= 0.02
    watch.stop()
    assert not vars(thing)


def test_operators_are_told_apart_by_their_weights() -> None:
    sizes = {"head": [320, 64], "q, k, v projection": [200, 64], "output": [64, 9], "MLP": [256, 64]}
    assert classify("pilotage::native_linear", [[1, 64], [320, 64], []], sizes) == "head"
    assert classify("aten::mm", [[9, 64], [64, 200]], sizes) == "q, k, v projection"  # 9 rows: not the output's weight
    assert classify("aten::addmm", [[200], [9, 64], [64, 200]], sizes) == "q, k, v projection"
    assert classify("aten::mm", [[9, 64], [64, 3]], sizes) == "other products"
    assert classify("pilotage::native_paged_attention", [[1]], sizes) == "attention"
    assert classify("pilotage::native_write_kv", [[1]], sizes) == "KV cache writes"
    assert classify("aten::empty", [], sizes) is None


def test_every_operator_of_ours_belongs_to_a_part() -> None:
    """One that is forgotten counts as fused code, the largest of them as half a step."""
    source = (Path(cpu.__file__).parent / "ops.cpp").read_text()
    names = re.findall(r'm\.def\("(native_\w+)\(', source)
    assert len(names) >= 7
    shapes = [[8, 64], [320, 64], [320, 64]]
    found = {name: classify(f"pilotage::{name}", shapes, {"head": [320, 64]}) for name in names}
    assert [name for name, part in found.items() if part is None] == ["native_argmax"]  # timed with the sampler
    assert found["native_likely_linear"] == "head"


SPIN = """import sys, time
sys.stdin.readline()
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end: pass
time.sleep(60)
"""


def test_a_turn_begins_when_the_others_are_idle() -> None:
    """One that goes on computing for a second is waited for; one that never stops is given up."""
    command = [sys.executable, "-c", SPIN]
    with subprocess.Popen([*command, "1.0"], stdin=subprocess.PIPE) as brief:
        assert brief.stdin is not None
        try:
            assert idle.wait([brief.pid], patience_s=30) is not None  # still waiting for its word
            brief.stdin.write(b"go\n")
            brief.stdin.flush()
            time.sleep(0.2)
            waited = idle.wait([brief.pid], patience_s=30)
            assert waited is not None and waited > 0.3
        finally:
            brief.kill()
    with subprocess.Popen([*command, "1000"], stdin=subprocess.PIPE) as endless:
        assert endless.stdin is not None
        try:
            endless.stdin.write(b"go\n")
            endless.stdin.flush()
            time.sleep(0.2)
            assert idle.wait([endless.pid], patience_s=0.5) is None
        finally:
            endless.kill()
    assert idle.wait([endless.pid]) is not None  # gone
