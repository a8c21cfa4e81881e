"""A model outside the source tree: scaffolded, installed with pip, found through its entry point, and served alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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


@pytest.mark.engine
def test_vllm_finds_and_serves_it(installed: Installed, tiny: Tiny) -> None:
    """The same weights give Hugging Face's tokens under the name that only the external package serves."""
    prompt = "the ship"
    code = (
        "import sys\n"
        "from vllm import LLM, ModelRegistry, SamplingParams\n"
        "from vllm.plugins import load_general_plugins\n"
        "if __name__ == '__main__':\n"
        "    load_general_plugins()\n"
        "    print('FOUND', 'AcmeForCausalLM' in ModelRegistry.get_supported_archs())\n"
        "    llm = LLM(sys.argv[1], dtype='float32', max_model_len=128, max_num_seqs=2, enforce_eager=True)\n"
        "    out = llm.generate([sys.argv[2]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))\n"
        "    print('PROMPT', out[0].prompt_token_ids)\n"
        "    print('TOKENS', out[0].outputs[0].token_ids)\n"
    )
    script = installed.site / "serve.py"
    script.write_text(code)
    done = installed.run(sys.executable, str(script), str(installed.checkpoint), prompt, timeout=500)
    printed = dict(re.findall(r"^(FOUND|PROMPT|TOKENS) (.*)$", done.stdout, re.MULTILINE))
    assert printed.get("FOUND") == "True" and "TOKENS" in printed, done.stderr[-3000:]

    oracle = AutoModelForCausalLM.from_pretrained(tiny("llama3"), dtype=torch.float32)
    ids = torch.tensor([json.loads(printed["PROMPT"])])
    expected = oracle.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=False)
    assert json.loads(printed["TOKENS"]) == expected[0, ids.shape[1] :].tolist()
