"""The Triton kernels in Triton's interpreter, fp32, against their definitions; bf16 is refused in it.

The interpreter has to be switched on before triton is imported, so each test is a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'pilotage[triton]'"
)

SMALL = """
import torch
import pilotage.functional as NF
from pilotage.kernels import cases
from pilotage.functional import registry

def compare(operator, dims, **more):
    case = cases.build(operator, dims, torch.float32, **more)
    args, kwargs = case.split(case.arguments)
    results = []
    with torch.no_grad():
        for name in ("triton", "torch"):
            with NF.forced({operator: name}):
                out = getattr(NF, operator)(*args, **kwargs)
            results.append([x[: case.rows] for x in (out if isinstance(out, tuple) else (out,))])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-6)
    print("equal", operator, dims, more)

compare("rms_norm", {"T": 3, "D": 33})
compare("rms_norm", {"T": 2, "D": 128}, options={"unit_offset": True})
compare("rotary", {"T": 3, "H": 20, "R": 12})
compare("mlp", {"T": 3, "D": 33, "F": 50}, optional=("gate_up_bias", "down_bias"), options={"activation": "gelu"})
compare("flash_attention", {"T": 37, "N": 6, "H": 20}, optional=("sinks",), options={"window": 5, "softcap": 3.0})
compare("attention_decode", {"T": 4, "N": 6, "K": 1, "C": 8}, optional=("sinks",), options={"window": 9})
compare("segmented_attention", {"T": 9, "N": 2, "K": 2, "C": 32, "H": 33}, options={"softcap": 3.0})
x = torch.ones(2, 8, dtype=torch.bfloat16)
print(NF.explain("rms_norm", x, x[0], eps=1e-6)["refused"]["triton"])
compiled = torch.compile(lambda x, w: NF.rms_norm(x, w, eps=1e-6) * 2, backend="aot_eager", fullgraph=True)
x, w = torch.randn(3, 8), torch.randn(8)
torch.testing.assert_close(compiled(x, w), registry.implementations("rms_norm")[-1].function(x, w, eps=1e-6) * 2)
print("in a graph:", NF.receipt()["rms_norm"][-1]["implementation"])
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_each_kernel_equals_its_definition_in_the_interpreter() -> None:
    printed = python(SMALL, TRITON_INTERPRET="1")
    assert printed.count("equal") == 7
    assert "x is torch.bfloat16, which Triton's interpreter computes wrongly" in printed
    assert "in a graph: triton" in printed


def test_without_a_device_or_the_interpreter_it_says_what_would_help() -> None:
    code = """
import torch
import pilotage.functional as NF
print(NF.explain("rms_norm", torch.ones(2, 8), torch.ones(8), eps=1e-6)["refused"]["triton"])
import os, triton.language
os.environ["TRITON_INTERPRET"] = "1"
print(NF.explain("rms_norm", torch.ones(2, 8), torch.ones(8), eps=1e-6)["refused"]["triton"])
import sys
print("imported", [name for name in sys.modules if name.startswith("pilotage.kernels.triton.")])
"""
    first, second, imported = python(code, TRITON_INTERPRET="").splitlines()
    assert first == "x is on cpu, not cuda (TRITON_INTERPRET=1 runs it in Triton's interpreter)"
    assert "set after triton was imported" in second
    assert imported == "imported []"


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator", ["rms_norm", "rotary", "mlp", "flash_attention", "attention_decode", "segmented_attention"]
)
def test_the_whole_check_passes(operator: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pilotage", "kernels", "check", operator, "--implementation", "triton", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert '"gradient": "pass"' in done.stdout
