"""A model outside the source tree: scaffolded, installed with pip, found through its entry point, and served alike."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotage.arch.scaffold import scaffold

Tiny = Callable[..., Path]


class Installed:
    """An environment with an external package in it, beside the one that runs the tests."""

    def __init__(self, base: Path, checkpoint: Path) -> None:
        self.site = base / "site"
        self.checkpoint = base / "checkpoint"
        shutil.copytree(checkpoint, self.checkpoint)
        config = json.loads((self.checkpoint / "config.json").read_text())
        (self.checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["AcmeForCausalLM"]}))
        # Llama under a name that nobody serves: nothing to write, so the scaffold is a whole model.
        made = scaffold("acme_model", str(self.checkpoint), "llama3", base / "project")
        assert not made.work_items
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--target", str(self.site), str(base / "project")], check=True)

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(self.site), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=self.site, timeout=timeout, check=False
        )

    def python(self, code: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", code, timeout=timeout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Installed:
    return Installed(tmp_path_factory.mktemp("acme"), tiny("llama3"))


def test_the_registry_finds_it(installed: Installed) -> None:
    done = installed.python(
        "from pilotage.models import registry\n"
        "entry = registry.find(['AcmeForCausalLM'])\n"
        "print(entry.origin, entry.path, entry.load().__name__, len(registry.entries()) > 1)\n"
    )
    assert done.stdout.split() == [
        "acme-model-for-pilotage",
        "acme_model.factory:AcmeForCausalLM",
        "AcmeForCausalLM",
        "True",
    ]


def test_it_is_gone_with_the_package() -> None:
    from pilotage.models import registry

    assert registry.find(["AcmeForCausalLM"]) is None


def test_its_weights_are_accounted_for(installed: Installed) -> None:
    done = installed.run(
        str(Path(sys.executable).with_name("pilotage")), "weights", str(installed.checkpoint), "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "pass"


def test_vllm_finds_it(installed: Installed) -> None:
    done = installed.python(
        "from vllm import ModelRegistry\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "print('AcmeForCausalLM' in ModelRegistry.get_supported_archs())\n"
    )
    assert done.stdout.split()[-1:] == ["True"], done.stderr[-2000:]


@pytest.mark.engine
def test_vllm_serves_it(installed: Installed, tiny: Tiny) -> None:
    """The same weights give the same tokens under the external package as under the built-in one."""
    code = (
        "import sys\n"
        "from vllm import LLM, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], dtype='float32', max_model_len=128, max_num_seqs=2, enforce_eager=True)\n"
        "    out = llm.generate(['the ship'], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))\n"
        "    print('TOKENS', out[0].outputs[0].token_ids)\n"
    )
    script = installed.site / "serve.py"
    script.write_text(code)
    tokens = []
    for checkpoint in (installed.checkpoint, tiny("llama3")):
        done = installed.run(sys.executable, str(script), str(checkpoint), timeout=500)
        lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS")]
        assert lines, done.stderr[-3000:]
        tokens.append(lines[0])
    assert tokens[0] == tokens[1]
