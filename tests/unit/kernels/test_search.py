"""Search reads a kernel library without importing it, ranks what fits and says why the rest does not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from pilotage.core.errors import BadInput
from pilotage.kernels import library
from pilotage.kernels.search import read, search

PREFILL = '''
"""Attention over a prompt (context encoding), causal, with grouped query heads (GQA)."""
raise ImportError("this library cannot be imported here")

import nki
import nki.language as nl
from ..checks import kernel_assert

_MAX_HEAD_DIM = 64 * 2
_PARTITIONS = nl.tile_size.pmax


@nki.jit
def attention_cte(q, k, v, scale=1.0, causal_mask=True, *, sliding_window=None):
    """Attend.

    Dimensions:
        d_model: width (512 or 1024)
    """
    _validate(q.shape[-1], q.shape[0], q.shape[1])
    return q


def _validate(d, bs, seqlen):
    kernel_assert(d <= _MAX_HEAD_DIM and d % 32 == 0, "head too large")
    assert bs in (1, 2, 4), "batch"
    assert seqlen < 100000


def never_called(d):
    assert d == 7
'''
DECODE = '''
import nki


def attention_tkg(q, k_cache, v_cache):
    """Token generation attention over a paged cache. d_head: head size (64 or 128)"""


@nki.jit(mode="trace")
def attention_bwd(q, k, v, grad):
    """Backward of attention."""
'''
TRITON = '''
import triton


@triton.jit
def rope_kernel(x, cos, sin):
    """Rotary embedding."""
'''


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    files = {
        "nkilib/core/attention/attention_cte.py": PREFILL,
        "nkilib/core/attention/attention_tkg.py": DECODE,
        "nkilib/core/attention/attention_cte_torch.py": "def attention_cte_torch_ref(q, k, v): ...\n",
        "nkilib/core/rope.py": TRITON,
        "nkilib/core/broken.py": "import nki\ndef broken(:\n",
        "nkilib/core/plain.py": "def attention_reference(q): ...\n",
        "nkilib/tests/test_attention.py": PREFILL,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    for folder in ("nkilib", "nkilib/core", "nkilib/core/attention"):
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_a_library_is_read_and_not_imported(shelf: Path) -> None:
    found = {kernel.name: kernel for kernel in library.scan([shelf])}
    assert set(found) == {"attention_cte", "attention_tkg", "attention_bwd", "rope_kernel"}
    prefill = found["attention_cte"]
    assert prefill.module == "nkilib.core.attention.attention_cte"
    assert (prefill.required, prefill.parameters[3:]) == (("q", "k", "v"), ("scale", "causal_mask", "sliding_window"))
    assert {str(bound) for bound in prefill.bounds} == {
        "d <= 128",
        "d divisible by 32",
        "bs in 1 or 2 or 4",
        "seqlen < 100000",
        "d_model in 512 or 1024",
    }
    assert prefill.text.splitlines()[0] == "Attend." and "context encoding" in prefill.text
    assert prefill.fallback == "nkilib.core.attention.attention_cte_torch:attention_cte_torch_ref"
    line = next(bound.line for bound in prefill.bounds if bound.relation == "%")
    assert "d % 32" in PREFILL.splitlines()[line - 1]
    assert (found["attention_tkg"].decorated, found["rope_kernel"].language) == (False, "Triton")


def test_what_fits_comes_first_with_the_lines_that_wrap_it(shelf: Path) -> None:
    query, hits = search("attention prefill, causal, GQA, head 128", paths=[shelf])
    assert str(query) == "attention, prefill, causal, GQA, head 128"
    wrapped = [hit for hit in hits if hit.step == 2]
    assert [hit.name for hit in wrapped if hit.fits] == ["attention_cte"]
    best = wrapped[0]
    assert best.lines[0] == "from nkilib.core.attention.attention_cte import attention_cte"
    assert best.lines[-2:] == (
        "wrapped = wrap_nki(attention_cte, fallback=attention_cte_torch_ref)",
        "wrapped[2](q, k, v)",
    )
    against = {hit.name: hit.against for hit in wrapped}
    assert "made for decode" in against["attention_tkg"] and "backward" in against["attention_bwd"]
    assert [hit.step for hit in hits] == sorted(hit.step for hit in hits), "in the order of the guide"
    assert any(hit.name.startswith("NF.flash_attention") for hit in hits if hit.step == 1)
    assert not any("rope" in hit.name for hit in hits)


def test_a_limit_that_is_broken_is_named_with_its_line(shelf: Path) -> None:
    _, hits = search("attention prefill head 256 batch 3", paths=[shelf])
    hit = next(hit for hit in hits if hit.name == "attention_cte")
    assert not hit.fits
    assert any(one.startswith("head 256 is not d <= 128 (line ") for one in hit.against)
    assert any(one.startswith("batch 3 is not bs in 1 or 2 or 4") for one in hit.against)


def test_an_undecorated_kernel_is_made_one_and_features_that_are_missing_are_said(shelf: Path) -> None:
    _, hits = search("attention decode with softcap", paths=[shelf])
    hit = next(hit for hit in hits if hit.name == "attention_tkg")
    assert "wrap_nki(nki.jit(attention_tkg), fallback=my_fallback)" in "\n".join(hit.lines)
    assert "says nothing of softcap" in hit.against


def test_other_targets_get_other_languages(shelf: Path) -> None:
    _, hits = search("rope", target="cuda", paths=[shelf])
    assert [hit.name for hit in hits if hit.step == 2] == ["rope_kernel"]
    assert any(hit.name == "NF.rotary: triton" and hit.fits for hit in hits)
    _, hits = search("rope head 512", target="cuda", paths=[shelf])
    ours = next(hit for hit in hits if hit.name == "NF.rotary: triton")
    assert not ours.fits and "head 512 is not <= 256" in ours.against


def test_what_is_not_understood_is_said() -> None:
    assert read("attention with zebra stripes").unread == ("with", "zebra", "stripes")
    with pytest.raises(BadInput, match=r"no operation is named.*attention"):
        search("something fast")
    with pytest.raises(BadInput, match="no target named 'tpu'"):
        search("attention", target="tpu")
    with pytest.raises(BadInput, match="no such file"):
        search("attention", paths=[Path("/no/such/library")])
