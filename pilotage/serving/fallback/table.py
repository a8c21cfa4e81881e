"""Try every causal language model of transformers: build a tiny one, serve it on pages, hold its tokens against HF's.

python -m pilotage.serving.fallback.table [--write docs/fallback.md] [ARCHITECTURE...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pilotage.core import store
from pilotage.core.errors import PilotageError, Unsupported
from pilotage.models.common.paging import PagedSession
from pilotage.serving.fallback import tiny
from pilotage.serving.fallback.load import load
from pilotage.serving.fallback.model import FallbackForCausalLM, in_a_line, require_decoder

SERVED, REFUSED, UNTRIED, WRONG = "served", "refused", "not tried", "WRONG"
PROMPTS, NEW_TOKENS = (1, 5, 23, 40), 16
MAX_LEN = 64
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


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

    fixed: dict[str, Any] = {"architecture": architecture, "model_type": model_type}
    if architecture not in architectures():
        return Row(**fixed, state=REFUSED, reason="its class generates from more than text, or is no causal model")
    try:
        path = tiny.checkpoint(architecture, model_type, directory)
    except Exception as error:
        refusal = _refused_by_config(architecture, model_type)
        reason = refusal or f"no tiny checkpoint: {in_a_line(error)}"
        return Row(**fixed, state=REFUSED if refusal else UNTRIED, reason=reason)
    try:
        model = load(path, dtype=torch.float32, max_model_len=MAX_LEN)
    except PilotageError as error:
        return Row(**fixed, state=REFUSED, reason=error.what)
    try:
        wanted, got = oracle(path, vocabulary(model.hf)), _serve(model)
    except Exception as error:
        return Row(**fixed, state=WRONG, reason=in_a_line(error))
    windows = any(layer.window is not None for layer in model.layers)
    if wanted != got:
        return Row(**fixed, state=WRONG, reason="tokens differ from Hugging Face's", windows=windows)
    return Row(**fixed, state=SERVED, tokens=sum(map(len, got)), windows=windows)


def _refused_by_config(architecture: str, model_type: str) -> str | None:
    """Why the config of an architecture is refused whatever the weights."""
    try:
        require_decoder(tiny.config(architecture, model_type), architecture)
    except Unsupported as error:
        return error.what
    return None


def prompts(words: int) -> list[list[int]]:
    """Random prompts of `PROMPTS` tokens, without the first few tokens, which are special ones."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, words, (size,), generator=generator).tolist() for size in PROMPTS]


def oracle(path: Path, words: int) -> list[list[int]]:
    """What Hugging Face's own model says to the prompts of a vocabulary."""
    return tiny.continue_greedily(path, prompts(words), NEW_TOKENS)


def _serve(model: FallbackForCausalLM) -> list[list[int]]:
    """Greedy tokens of all prompts together: prefill in two packed chunks, then decode."""
    asked = prompts(vocabulary(model.hf))
    session = PagedSession(model=model, num_requests=len(asked), max_tokens=MAX_LEN)
    start = {i: p[: (len(p) + 1) // 2] for i, p in enumerate(asked)}
    out = session.step(start, bucket=sum(map(len, start.values())) + 3)
    rest = {i: p[(len(p) + 1) // 2 :] for i, p in enumerate(asked) if len(p) > 1}
    out |= session.step(rest, bucket=sum(map(len, rest.values())) + 3)
    said: list[list[int]] = [[] for _ in asked]
    for step in range(NEW_TOKENS):
        new = {i: [int(rows[-1].argmax())] for i, rows in out.items()}
        for i, (token,) in new.items():
            said[i].append(token)
        if step + 1 < NEW_TOKENS:
            out = session.step(dict(sorted(new.items())), decode=True)
    return said


def vocabulary(hf: Any) -> int:
    """How many tokens a model knows."""
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

    quiet: Any = hf_logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    warnings.simplefilter("ignore")
    logging.getLogger("vllm.pilotage").setLevel(logging.ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
