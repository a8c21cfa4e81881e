"""Run the chosen tests of vLLM's own suite against this target and write the counts to docs/upstream.md.

    python tests/upstream/run.py [--only SUBSTRING] [--resume] [--no-docs]

The tests come from vLLM's source distribution, fetched by `pip download` and unpacked without vLLM's code, so that they
import the installed vLLM. No file of theirs is changed: model names resolve to tiny checkpoints in a local hub cache
(`hub.py`), and exclusions are made when tests are collected (`recorder.py`).

Exit code 0 if everything that was chosen passed, 1 if not, 2 if the tests could not be had.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = "0.33.0"
# What upstream's tests import and pilotage does not need; installed beside the environment, not into it.
PACKAGES = ("tblib==3.2.2", "pytest-asyncio==1.5.0")
PAGE = ROOT / "docs" / "upstream.md"
OUTCOMES = ("passed", "failed", "skipped", "excluded")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only the files whose path contains this")
    parser.add_argument(
        "--resume", action="store_true", help="keep the counts of files that have run to their end before"
    )
    parser.add_argument("--no-docs", action="store_true", help="leave docs/upstream.md as it is")
    arguments = parser.parse_args()
    from pilotage.core import store

    chosen = read_chosen(HERE / "chosen.toml")
    wanted = [entry for entry in chosen if arguments.only in entry["path"]]
    if not wanted:
        parser.error(f"no chosen file contains {arguments.only!r}")
    home = store.home() / "upstream" / VERSION
    try:
        prepare(home)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        print(f"upstream: the tests of vLLM {VERSION} could not be had: {error}", file=sys.stderr)
        return 2
    counts: dict[str, Counter[str]] = {}
    for entry in wanted:
        kept = ended_before(home, entry) if arguments.resume else None
        counts[entry["path"]] = kept if kept is not None else run_file(home, entry)
        print(f"{entry['path']}: {', '.join(f'{n} {what}' for what, n in counts[entry['path']].items())}", flush=True)
    total = sum(counts.values(), Counter())
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped by upstream, ", end="")
    print(f"{total['excluded']} excluded")
    if len(wanted) == len(chosen) and not arguments.no_docs:
        PAGE.write_text(page(wanted, counts))
    return 1 if total["failed"] or not total["passed"] else 0


def read_chosen(path: Path) -> list[dict[str, Any]]:
    """Read the allow list.

    Raises:
        ValueError: an exclusion without tests or without a reason, or a file named twice.
    """
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text())["file"]
    paths = [entry["path"] for entry in entries]
    if len(set(paths)) != len(paths):
        raise ValueError("a file is named twice")
    for entry in entries:
        unknown = set(entry) - {"path", "about", "exclude", "timeout_s"}
        if unknown:
            raise ValueError(f"{entry['path']}: unknown keys {', '.join(sorted(unknown))}")
        for left_out in entry.get("exclude", []):
            if not left_out.get("tests") or not left_out.get("reason"):
                raise ValueError(f"{entry['path']}: an exclusion needs tests and a reason")
    return entries


def prepare(home: Path) -> None:
    """Fetch and unpack the tests, install what they import, build the local hub."""
    import hub

    tests = home / "src" / "tests"
    if not tests.exists():
        archive = home / f"vllm-{VERSION}.tar.gz"
        if not archive.exists():
            home.mkdir(parents=True, exist_ok=True)
            _pip(
                "download",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                "vllm",
                f"vllm=={VERSION}",
                "-d",
                str(home),
            )
        unpack(archive, home / "src")
    if not (home / "packages").exists():
        _pip("install", "--no-deps", "--target", str(home / "packages"), *PACKAGES)
    hub.build(home / "hub", [*tests.glob("prompts/*.txt"), *tests.glob("**/*.py")])


def _pip(*arguments: str) -> None:
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, env=environment)


def unpack(archive: Path, target: Path) -> None:
    """Unpack tests/ and pyproject.toml; vLLM's code stays behind, or it would hide what is installed."""
    with tarfile.open(archive) as file:
        members = []
        for member in file.getmembers():
            member.name = member.name.partition("/")[2]
            if member.name == "pyproject.toml" or member.name.startswith("tests/"):
                members.append(member)
        partial = target.with_suffix(".partial")
        file.extractall(partial, members=members, filter="data")
    partial.rename(target)


def run_file(home: Path, entry: dict[str, Any]) -> Counter[str]:
    """Run one file in a process of its own; a test that never reported counts as failed."""
    from pilotage.core import store

    results = _results(home, entry)
    results.parent.mkdir(exist_ok=True)
    for path in (results, results.with_suffix(".counts.json")):
        path.unlink(missing_ok=True)
    patterns = [pattern for left_out in entry.get("exclude", []) for pattern in left_out["tests"]]
    environment = {
        **os.environ,
        # Tests start `vllm` by name.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{home / 'packages'}:{HERE}",
        "HF_HOME": str(home / "hub"),
        "HF_HUB_OFFLINE": "1",
        "UPSTREAM_RESULTS": str(results),
        "UPSTREAM_EXCLUDE": json.dumps(patterns),
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "recorder", "--tb=short"]
    command += ["--timeout", "300", f"tests/{entry['path']}"]
    start = time.monotonic()
    with results.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home / "src", env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=entry.get("timeout_s", 900))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    counts = count(results)
    # 5 is "no tests collected", 1 "some failed". Everything else that is not success hides tests.
    if code not in (0, 1):
        counts["failed"] += 1
    for test, why in failures(results):
        print(f"  failed: {test}: {why}", file=sys.stderr)
    counts["seconds"] = round(time.monotonic() - start)
    store.write_json(results.with_suffix(".counts.json"), {"entry": entry, "counts": dict(counts)})
    return counts


def ended_before(home: Path, entry: dict[str, Any]) -> Counter[str] | None:
    """Return the counts of a file that has run to its end with this entry of the allow list, nothing failing."""
    path = _results(home, entry).with_suffix(".counts.json")
    if not path.exists():
        return None
    said = json.loads(path.read_text())
    counts = Counter(said["counts"])
    return counts if said["entry"] == entry and not counts["failed"] else None


def _results(home: Path, entry: dict[str, Any]) -> Path:
    return home / "results" / f"{entry['path'].replace('/', '.')}.jsonl"


def count(results: Path) -> Counter[str]:
    """Count the outcomes in a file of JSON lines; each test once, by its last."""
    if not results.exists():
        return Counter()
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return Counter({line["test"]: line["outcome"] for line in lines if line["outcome"] in OUTCOMES}.values())


def failures(results: Path) -> Sequence[tuple[str, str]]:
    """Return (test, last line of why) of what failed."""
    if not results.exists():
        return []
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return [(line["test"], line["why"].strip().splitlines()[-1][:200]) for line in lines if line["outcome"] == "why"]


def page(entries: Sequence[dict[str, Any]], counts: dict[str, Counter[str]]) -> str:
    """Return docs/upstream.md."""
    total = sum(counts.values(), Counter())
    text = f"""# vLLM's own tests on this target

<!-- Written by `make test-upstream`. -->

`make test-upstream` runs tests of vLLM {VERSION}, as its authors wrote them, against this target. It fetches the
source distribution, unpacks its tests and runs the files of `tests/upstream/chosen.toml`. No test is edited. The names
of hub models resolve to tiny checkpoints of our own architectures (`tests/upstream/hub.py`): the tests check the engine
and the server, not what a trained model says. "Skipped" is what upstream's own marks leave out on this machine.

Last run: **{total["passed"]} passed, {total["failed"]} failed**,
{total["skipped"]} skipped, {total["excluded"]} excluded, in {total["seconds"]} s.

| file | about | passed | failed | skipped | excluded |
|---|---|---|---|---|---|
"""
    for entry in entries:
        row = counts[entry["path"]]
        numbers = " | ".join(str(row[outcome]) for outcome in OUTCOMES)
        text += f"| `{entry['path']}` | {entry['about']} | {numbers} |\n"
    text += "\n## Excluded\n\n| file | tests | reason |\n|---|---|---|\n"
    for entry in entries:
        for left_out in entry.get("exclude", []):
            names = ", ".join(f"`{name}`" for name in left_out["tests"])
            text += f"| `{entry['path']}` | {names} | {left_out['reason']} |\n"
    return text


if __name__ == "__main__":
    sys.exit(main())
