"""What this machine has, what it lacks, and how to get it. Imports neither torch nor vllm: metadata tells enough."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.environment import switched_on

TORCH, VLLM = "2.13.0", "0.33.0"
PYTHON = (3, 11)
PLATFORM_GROUP, GENERAL_GROUP = "vllm.platform_plugins", "vllm.general_plugins"
# A 270M model needs about this much: weights twice while converting, an engine, and the reference beside it.
_MEMORY_BYTES, _DISK_BYTES = 6 << 30, 4 << 30

OK, WARN, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the examination.

    Attributes:
        part: what was looked at.
        state: ok, warning (works, with a limit) or missing (the CPU target does not work without it).
        found: what is there.
        do: how to get or repair it; empty when there is nothing to do.
    """

    part: str
    state: str
    found: str
    do: str = ""

    def to_json(self) -> dict[str, str]:
        return {"part": self.part, "state": self.state, "found": self.found, "do": self.do}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def python() -> Finding:
    found = platform.python_version()
    if sys.version_info[:2] != PYTHON:
        return Finding(part="python", state=MISSING, found=found, do="use Python 3.11, then `make setup`")
    return Finding(part="python", state=OK, found=f"{found}, {sys.prefix}")


def package(name: str, wanted: str | None = None, *, needed: bool = True, do: str = "run `make setup`") -> Finding:
    """Look a package up; `wanted` is the version that pilotage is written against."""
    found = _version(name)
    if found is None:
        return Finding(part=name, state=MISSING if needed else WARN, found="not installed", do=do)
    if wanted is not None and found.split("+")[0] != wanted:
        return Finding(part=name, state=MISSING, found=f"{found}, and pilotage is written against {wanted}", do=do)
    return Finding(part=name, state=OK, found=found)


def vllm_build() -> Finding:
    """Tell a pure-Python vLLM (the empty target) from a wheel with device code, by the files it installed."""
    part = "vllm build"
    try:
        distribution = metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        return Finding(part=part, state=MISSING, found="no vllm", do="run `make setup`")
    compiled = [str(file) for file in distribution.files or [] if str(file).endswith(".so")]
    device_code = [name for name in compiled if "_C" in name or "_moe" in name or "flash" in name.lower()]
    if not device_code:
        return Finding(part=part, state=OK, found="empty target: no device code, every operator is ours")
    wants_cuda = any("nvidia" in line or "flashinfer" in line for line in distribution.requires or [])
    kind = "the CUDA wheel" if wants_cuda else "a build with device code"
    return Finding(
        part=part,
        state=WARN,
        found=f"{kind} ({device_code[0]}); the platform plugin still decides, but nothing here was tried with it",
        do="`make setup` in a new environment builds the empty target",
    )


def _entry_points(group: str) -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=group))


def plugins() -> list[Finding]:
    """The platform plugins that vLLM would find; two active ones are an error there, so every other one counts."""
    findings = []
    platforms = _entry_points(PLATFORM_GROUP)
    ours = [point for point in platforms if point.value.startswith("pilotage.")]
    others = [point for point in platforms if not point.value.startswith("pilotage.")]
    again = "reinstall pilotage: `pip install --no-build-isolation -e .`"
    if not ours:
        findings.append(
            Finding(part="platform plugin", state=MISSING, found=f"pilotage is not in {PLATFORM_GROUP}", do=again)
        )
    elif switched_on("PILOTAGE_DISABLE"):
        findings.append(
            Finding(
                part="platform plugin", state=MISSING, found="PILOTAGE_DISABLE=1 is set", do="unset PILOTAGE_DISABLE"
            )
        )
    else:
        findings.append(Finding(part="platform plugin", state=OK, found=ours[0].value))
    allowed = os.environ.get("VLLM_PLUGINS")
    named = None if allowed is None else {name.strip() for name in allowed.split(",")}
    if named is not None and "pilotage" not in named:
        findings.append(
            Finding(
                part="VLLM_PLUGINS",
                state=MISSING,
                found=f"{allowed!r} leaves pilotage out",
                do="unset it, or add pilotage to it",
            )
        )
    rivals = [point for point in others if named is None or point.name in named]
    if rivals:
        names = ", ".join(f"{point.name} ({point.value})" for point in rivals)
        findings.append(
            Finding(
                part="other platform plugins",
                state=WARN,
                found=f"{names}; if both are active vLLM refuses to start",
                do="set VLLM_PLUGINS=pilotage, or use an environment of its own",
            )
        )
    if not any(point.value.startswith("pilotage.") for point in _entry_points(GENERAL_GROUP)):
        findings.append(
            Finding(part="model plugin", state=MISSING, found=f"pilotage is not in {GENERAL_GROUP}", do=again)
        )
    return findings


def compiler() -> Finding:
    """The C++ compiler that torch.compile calls on the CPU; asked for its version and for one tiny program."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    do = "install one: `apt-get install g++`, or name yours in CXX"
    if path is None:
        return Finding(part="C++ compiler", state=MISSING, found=f"{name} not found", do=do)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "t.cpp")
        # The generated kernels are loaded into Python, so its headers are needed as well.
        source.write_text("#include <Python.h>\n#include <cmath>\nint main() { return std::isnan(0.0); }\n")
        include = f"-I{sysconfig.get_path('include')}"
        command = [path, include, "-fopenmp", "-c", str(source), "-o", str(Path(directory, "t.o"))]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        errors = [line for line in made.stderr.splitlines() if "error" in line] or ["no message"]
        first = errors[0].strip()
        if "Python.h" in first:
            do = "install Python's headers: `apt-get install python3-dev`"
        return Finding(part="C++ compiler", state=MISSING, found=f"{path} cannot build a program: {first}", do=do)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    return Finding(part="C++ compiler", state=OK, found=said[0] if said else path)


def resources() -> list[Finding]:
    """Cores, memory and disk."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = _available_memory() or total
    place = store.home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    findings = [
        Finding(part="cores", state=OK, found=str(cores)),
        Finding(
            part="memory",
            state=OK if available >= _MEMORY_BYTES else WARN,
            found=f"{total / 2**30:.1f} GiB, {available / 2**30:.1f} GiB available",
            do=""
            if available >= _MEMORY_BYTES
            else "close other programs; gemma3-270m wants 6 GiB, tiny models run in 2",
        ),
        Finding(
            part="disk",
            state=OK if free >= _DISK_BYTES else WARN,
            found=f"{free / 2**30:.1f} GiB free at {place}",
            do="" if free >= _DISK_BYTES else "free some space, or name another place in PILOTAGE_HOME",
        ),
    ]
    if not os.access(place, os.W_OK):
        findings.append(
            Finding(part="cache directory", state=MISSING, found=f"{place} cannot be written", do="set PILOTAGE_HOME")
        )
    return findings


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def compile_cache() -> Finding:
    named = os.environ.get("PILOTAGE_COMPILE_CACHE") or os.environ.get("VLLM_NEURON_COMPILE_CACHE")
    place = Path(named) if named else store.home() / "compile"
    if not place.exists():
        return Finding(part="compile cache", state=OK, found=f"empty ({place}); the first start compiles")
    files = [path for path in place.rglob("*") if path.is_file()]
    held = sum(path.stat().st_size for path in files)
    return Finding(part="compile cache", state=OK, found=f"{len(files)} files, {held / 1e6:.0f} MB ({place})")


def extras() -> list[Finding]:
    """What only some commands need."""
    from pilotage.report.browser import chromium

    browser = chromium()
    return [
        package("gguf", needed=False, do="needed to build gemma3-270m: `pip install gguf`"),
        Finding(part="chromium", state=OK, found=browser)
        if browser
        else Finding(
            part="chromium",
            state=WARN,
            found="not found; only the tests and the picture of the report need it",
            do="run `scripts/install-chromium.sh`, or name yours in PILOTAGE_CHROMIUM",
        ),
    ]


def fallback() -> Finding:
    """What serves a model without a package; whether it serves a certain one shows when it is loaded."""
    version = _version("transformers")
    if version is None:
        return Finding(part="day-zero fallback", state=WARN, found="not usable without transformers", do="`make setup`")
    return Finding(
        part="day-zero fallback",
        state=OK,
        found=f"models without a package are served on transformers {version}: slow, proven at load (docs/fallback.md)",
    )


def targets(findings: list[Finding]) -> list[dict[str, Any]]:
    """Which targets are usable. Hardware that is only seen, not tried, is never called usable."""
    missing = [finding.part for finding in findings if finding.state == MISSING]
    cpu = {
        "target": "cpu",
        "usable": not missing,
        "why": f"missing: {', '.join(missing)}" if missing else "everything needed is here",
    }
    neuron = sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*"))
    packages = [name for name in ("torch-neuronx", "neuronx-cc", "vllm-neuron") if _version(name)]
    seen = [*neuron[:1], *packages]
    neuron_why = f"seen: {', '.join(seen)}" if seen else "no device /dev/neuron*, no Neuron package"
    return [
        cpu,
        {
            "target": "neuron",
            "usable": False,
            "why": f"{neuron_why}; untested on hardware",
        },
        {
            "target": "cuda",
            "usable": False,
            "why": f"{_cuda()}; untested on hardware",
        },
    ]


def _cuda() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi"
    try:
        asked = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "nvidia-smi does not answer"
    lines = asked.stdout.strip().splitlines()
    return f"seen: {lines[0]}" if asked.returncode == 0 and lines else "nvidia-smi finds no device"


def examine() -> dict[str, Any]:
    """Examine the machine.

    Returns:
        {"usable": bool (the CPU target), "targets": [...], "findings": [{"part", "state", "found", "do"}]}.
    """
    findings = [
        python(),
        package("pilotage"),
        package("torch", TORCH),
        package("vllm", VLLM),
        vllm_build(),
        package("transformers"),
        fallback(),
        package("safetensors"),
        *plugins(),
        compiler(),
        *resources(),
        compile_cache(),
        *extras(),
    ]
    found = targets(findings)
    return {
        "usable": found[0]["usable"],
        "targets": found,
        "findings": [finding.to_json() for finding in findings],
    }
