"""Try every causal language model of transformers: build a tiny one, serve it on pages, hold its tokens against HF's.

python -m pilotage.serving.fallback.table [--write docs/fallback.md] [ARCHITECTURE...]
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pilotage.core import store
from pilotage.core.errors import BadInput, PilotageError
from pilotage.models.common.paging import PagedSession
from pilotage.serving.fallback.load import load
from pilotage.serving.fallback.model import FallbackForCausalLM, in_a_line

SERVED, REFUSED, UNTRIED, WRONG = "served", "refused", "not tried", "WRONG"
PROMPTS, NEW_TOKENS = (1, 5, 23, 40), 16
MAX_LEN = 64
_MOST_PARAMETERS = 6_000_000
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"
# For configs that `arch.twin.shrink` cannot make small: every name that a size goes by, and sizes that divide.
_PLAIN = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels"), 16),
    **{"n_group": 1, "topk_group": 1, "rotary_dim": 8, "sliding_window": 16, "vocab_size": 320},
    **{"kv_lora_rank": 24, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
}
# Left open by some config classes, whose models cannot be built without them.
_STATED = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 48},
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "attention_layers", "layers_block_type", "no_rope_layers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One architecture of the table.

    Attributes:
        architecture, model_type: as transformers names them.
        state: served, refused, not tried, or WRONG: served with other tokens than Hugging Face's.
        reason: why it is refused or could not be tried.
        tokens: compared, where it was served.
        windows: whether a layer has one.
    """

    architecture: str
    model_type: str
    state: str
    reason: str = ""
    tokens: int = 0
    windows: bool = False


def rows() -> list[tuple[str, str]]:
    """List (architecture, model type) of every causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        found.setdefault(name, model_type)
    return sorted(found.items())


def examine(architecture: str, model_type: str, directory: Path) -> Row:
    """Build a tiny perturbed checkpoint of an architecture, serve it without an engine, compare tokens.

    Args:
        architecture, model_type: as transformers names them.
        directory: for the checkpoint.
    """
    from pilotage.serving.fallback.config import architectures

    fixed = {"architecture": architecture, "model_type": model_type}
    if architecture not in architectures():
        return Row(**fixed, state=REFUSED, reason="its class generates from more than text, or is no causal model")
    try:
        path = _checkpoint(architecture, model_type, directory)
    except Exception as error:
        return Row(**fixed, state=UNTRIED, reason=f"no tiny checkpoint: {in_a_line(error)}")
    try:
        model = load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    except PilotageError as error:
        return Row(**fixed, state=REFUSED, reason=error.what)
    try:
        wanted, got = _oracle(path), _serve(model)
    except Exception as error:
        return Row(**fixed, state=WRONG, reason=in_a_line(error))
    windows = any(layer.window is not None for layer in model.layers)
    if wanted != got:
        return Row(**fixed, state=WRONG, reason="tokens differ from Hugging Face's", windows=windows)
    return Row(**fixed, state=SERVED, tokens=sum(map(len, got)), windows=windows)


def _checkpoint(architecture: str, model_type: str, directory: Path) -> Path:
    from transformers import AutoConfig

    from pilotage.arch import twin

    raw = {**AutoConfig.for_model(model_type).to_dict(), "architectures": [architecture]}
    raw |= {key: value for key, value in _STATED.items() if key in raw and raw[key] is None}
    if "rope_parameters" in raw:
        rope = raw["rope_parameters"] or {}
        raw["rope_parameters"] = {"rope_type": "default", **rope}
        if not any(isinstance(value, Mapping) for value in rope.values()) and rope.get("rope_theta") is None:
            raw["rope_parameters"]["rope_theta"] = 10000.0
    if "is_decoder" in raw:  # without it the class reads in both directions
        raw["is_decoder"] = True
    first: Exception | None = None
    for index, small in enumerate((twin.shrink, plain)):
        try:
            config = small(raw)
            _require_small(config)
            path = twin.build(config, directory / f"{architecture}-{index}")
            _continue(path, [[3, 4, 5]], 1)  # sizes may be legal and still not fit each other
            return path
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _require_small(config: Mapping[str, Any]) -> None:
    """Refuse what would fill the memory: a size that goes by a name nobody here knows stays as large as it was."""
    from transformers import AutoModelForCausalLM

    from pilotage.arch.spec import hf_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(config))
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise BadInput(f"{count:,} parameters are left where {_MOST_PARAMETERS:,} are allowed", where="tiny config")


def plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Make any config small by the names of its sizes; what it does not know it leaves."""
    small = copy.deepcopy(dict(raw))
    for key in ("quantization_config", "auto_map", "dtype", "torch_dtype"):
        small.pop(key, None)
    for key, value in raw.items():
        if key in _PLAIN and value is not None and not isinstance(value, list | dict):
            small[key] = _PLAIN[key]
    counts = {raw.get(key) for key in ("num_hidden_layers", "n_layer", "num_layers")}
    for key, value in raw.items():
        if isinstance(value, list) and (key in _PER_LAYER or len(value) in counts):
            small[key] = _some(small[key], _PLAIN["num_hidden_layers"])
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        if small.get(key) is not None:
            small[key] = {"pad": 0, "eos": 1, "bos": 2}[key[:3]]
    return small


def _some(values: Sequence[Any], count: int) -> list[Any]:
    kinds = list(dict.fromkeys(map(str, values)))
    first = [next(v for v in values if str(v) == kind) for kind in kinds]
    return [first[i % len(first)] for i in range(count)]


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, vocabulary, (size,), generator=generator).tolist() for size in PROMPTS]


def _oracle(path: Path) -> list[list[int]]:
    return _continue(path, _prompts(_vocabulary(_own(path))), NEW_TOKENS)


def _own(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def _continue(path: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of Hugging Face's own model, without a cache, in a copy of its own."""
    hf = _own(path)
    said = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(hf(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        said.append(tokens[len(prompt) :])
    return said


def _serve(model: FallbackForCausalLM) -> list[list[int]]:
    """Greedy tokens of all prompts together: prefill in two packed chunks, then decode."""
    prompts = _prompts(_vocabulary(model.hf))
    session = PagedSession(model=model, num_requests=len(prompts), max_tokens=MAX_LEN)
    start = {i: p[: (len(p) + 1) // 2] for i, p in enumerate(prompts)}
    out = session.step(start, bucket=sum(map(len, start.values())) + 3)
    rest = {i: p[(len(p) + 1) // 2 :] for i, p in enumerate(prompts) if len(p) > 1}
    out |= session.step(rest, bucket=sum(map(len, rest.values())) + 3)
    said: list[list[int]] = [[] for _ in prompts]
    for step in range(NEW_TOKENS):
        new = {i: [int(rows[-1].argmax())] for i, rows in out.items()}
        for i, (token,) in new.items():
            said[i].append(token)
        if step + 1 < NEW_TOKENS:
            out = session.step(dict(sorted(new.items())), decode=True)
    return said


def _vocabulary(hf: Any) -> int:
    return int(hf.get_input_embeddings().weight.shape[0])


def sweep(wanted: Iterable[str] = (), *, into: Path | None = None) -> list[Row]:
    """Examine all architectures, or those named; `into` has the rows so far, as JSON, after each one."""
    from pilotage.core.progress import track

    names = set(wanted)
    chosen = [one for one in rows() if not names or one[0] in names or one[1] in names]
    found = []
    for architecture, model_type in track(chosen, "Trying architectures"):
        with tempfile.TemporaryDirectory() as directory:
            found.append(examine(architecture, model_type, Path(directory)))
        if into is not None:
            store.write_json(into, [vars(row) for row in found])
    return found


def markdown(found: Sequence[Row]) -> str:
    """Write the table, and above it the counts."""
    import transformers

    from pilotage.models import registry

    known = registry.entries()
    counts = {state: sum(row.state == state for row in found) for state in (SERVED, REFUSED, UNTRIED, WRONG)}
    lines = [
        f"transformers {transformers.__version__}, {len(found)} architectures: {counts[SERVED]} served with tokens "
        f"equal to Hugging Face's, {counts[REFUSED]} refused with the reason, {counts[UNTRIED]} not tried "
        f"because no tiny checkpoint could be built, {counts[WRONG]} served with other tokens.",
        "",
        "| architecture | fallback | sliding window | package | why not |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        package = "yes" if row.architecture in known else ""
        window = "yes" if row.windows else ""
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.architecture} | {row.state} | {window} | {package} | {reason} |")
    return "\n".join(lines)


def main() -> int:
    """Run the sweep; 1 if an architecture is served with other tokens than Hugging Face's."""
    parser = argparse.ArgumentParser(prog="python -m pilotage.serving.fallback.table", description=__doc__)
    parser.add_argument("architectures", nargs="*", help="some only, by architecture or model type")
    parser.add_argument("--write", type=Path, help="put the table between the markers of this page")
    parser.add_argument("--rows", type=Path, help="keep the rows here, as JSON, while it runs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _quiet()
    found = sweep(arguments.architectures, into=arguments.rows)
    if arguments.json:
        print(json.dumps([vars(row) for row in found], indent=1))
    else:
        print(markdown(found))
    if arguments.write is not None:
        page = arguments.write.read_text()
        before, _, rest = page.partition(_BEGIN)
        after = rest.partition(_END)[2]
        store.write_text(arguments.write, f"{before}{_BEGIN}\n{markdown(found)}\n{_END}{after}")
    return int(any(row.state == WRONG for row in found))


def _quiet() -> None:
    import logging
    import warnings

    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("vllm.pilotage").setLevel(logging.ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
