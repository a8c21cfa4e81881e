"""Module checks on two tensor-parallel ranks: as good as one, and wrong where a rank is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pilotage.accuracy.modules import ModulePlan
from pilotage.accuracy.validate import validate
from pilotage.core.nouns import Status

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("name", ["gemma3", "llama3"])
def test_every_module_passes_on_two_ranks(name: str, tiny: Callable[..., Path]) -> None:
    patterns = ("layers.[0-1].**", "embed_tokens", "norm", "rotary_emb")
    found = {}
    for ranks in (1, 2):
        plan = ModulePlan(patterns=patterns, ranks=ranks)
        result = validate(str(tiny(name)), levels=(3,), checks=plan)
        assert result.status is Status.PASS, [m for m in result.modules if m["verdict"]["status"] != "pass"]
        found[ranks] = {(m["module"], m["dtype"]) for m in result.modules}
    assert found[1] == found[2]
    assert ("layers.0.self_attn.k_proj", "bfloat16") in found[2]
    assert ("layers.1.self_attn", "float32") in found[2]


def test_a_fault_of_ranks_is_found(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank adds nothing to the sum of the MLP's output; each rank is a process that reads this sitecustomize."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name != 'pilotage.models.common.blocks' or getattr(self, 'busy', False):\n"
        "            return None\n"
        "        import importlib.util\n"
        "        self.busy = True\n"
        "        spec = importlib.util.find_spec(name)\n"
        "        run = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            run(module)\n"
        "            from pilotage.parallel import get_tp_group\n"
        "            real = module.GatedMLP.forward\n"
        "            def forward(self, *a, **k):\n"
        "                out = real(self, *a, **k)\n"
        "                return out * 0.999 if get_tp_group().world_size > 1 else out\n"
        "            module.GatedMLP.forward = forward\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = ModulePlan(patterns=("layers.0.mlp", "layers.0.self_attn"), ranks=2)
    result = validate(str(tiny("llama3")), levels=(3,), checks=plan, arms=("float32",))
    statuses = {m["module"]: m["verdict"]["status"] for m in result.modules}
    assert statuses["layers.0.mlp"] == "fail"
    assert statuses["layers.0.self_attn"] == "pass"
