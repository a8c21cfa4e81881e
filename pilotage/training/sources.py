"""From files and data sets to tokens, kept so that a resumed run and other ranks need not tokenise again."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pilotage.core import store
from pilotage.core.errors import BadInput, Unavailable
from pilotage.training.packing import Tokens
from pilotage.training.recipe import DataSection, HubData

# Documents that are handed to the tokenizer at once.
_CHUNK = 512
_RECIPE = 1

Document = str | tuple[str, str]  # a text, or a prompt and what is learned after it


def files(patterns: Sequence[str], where: str) -> list[Path]:
    """Find the files that patterns name, each once, in order.

    Raises:
        BadInput: a pattern that names none.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matched = [Path(name) for name in sorted(glob.glob(pattern, recursive=True)) if Path(name).is_file()]
        if not matched:
            raise BadInput(
                "no such file", where=f"{where}: {pattern}", do="name a file, or a pattern like docs/**/*.txt"
            )
        found |= dict.fromkeys(matched)
    return list(found)


def read(path: Path, section: DataSection) -> Iterator[Document]:
    """Read the documents of a file.

    Raises:
        BadInput: it is not UTF-8, or a line of a .jsonl file has no text; with the line's number.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot be read ({error})", where=str(path)) from error
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _object(line, section.field, f"{path}:{number}")
    elif section.documents == "paragraph":
        yield from (part.strip("\n") for part in text.split("\n\n") if part.strip())
    elif text.strip():
        yield text


def _object(line: str, field: str, where: str) -> Document:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInput(f"not valid JSON ({error})", where=where, do="one object a line") from error
    return _document(value, field, where)


def _document(value: Any, field: str, where: str) -> Document:
    if isinstance(value, dict):
        if isinstance(value.get("prompt"), str) and isinstance(value.get("completion"), str):
            return value["prompt"], value["completion"]
        if isinstance(value.get(field), str):
            return str(value[field])
    known = ", ".join(value) if isinstance(value, dict) else type(value).__name__
    raise BadInput(
        f"no text under {field!r}, and not prompt and completion; there is {known}",
        where=where,
        do="set data.field",
    )


def hub_documents(hub: HubData, field: str) -> Iterator[Document]:
    """Read a data set through `datasets`.

    Raises:
        Unavailable: the package is missing, or the data set cannot be reached.
        BadInput: no such split or field.
    """
    where = f"data.train_hub, {hub.name}"
    try:
        import datasets
    except ImportError as error:
        raise Unavailable(
            "the package datasets is not installed", where=where, do="pip install pilotage[train]"
        ) from error
    loader: Any = datasets
    try:
        rows = loader.load_dataset(hub.name, hub.subset, split=hub.split)
    except ValueError as error:
        raise BadInput(_last_line(error), where=where) from error
    except Exception as error:  # whatever the client raises when there is no way to the hub
        raise Unavailable(
            f"cannot be loaded ({type(error).__name__}: {_last_line(error)})",
            where=where,
            do="check the name and the network, or name local files under data.train",
        ) from error
    for index, row in enumerate(rows):
        yield _document(row, field, f"{where}, row {index}")


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def tokenise(documents: Iterable[Document], tokenizer: Any) -> Tokens:
    """Turn documents into tokens: as the tokenizer begins a text, and ended by its end-of-sequence token.

    Raises:
        BadInput: there is no document, or no end-of-sequence token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise BadInput("has no end-of-sequence token", where="model.tokenizer", do="define eos_token")
    ids: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    starts: list[int] = []
    total = 0
    for chunk in _chunks(documents):
        # A prompt and its completion are tokenised apart, so that no token belongs to both.
        heads = tokenizer([item if isinstance(item, str) else item[0] for item in chunk])["input_ids"]
        tails = tokenizer([item[1] for item in chunk if not isinstance(item, str)] or [""], add_special_tokens=False)
        rest = iter(tails["input_ids"])
        for item, head in zip(chunk, heads, strict=True):
            tail = [] if isinstance(item, str) else next(rest)
            row = [*head, *tail]
            if not row or row[-1] != end:
                row.append(end)
            flags = np.ones(len(row), dtype=bool)
            flags[: 0 if isinstance(item, str) else len(head)] = False
            ids.append(np.array(row, dtype=np.int32))
            learned.append(flags)
            starts.append(total)
            total += len(row)
    if not ids:
        raise BadInput("there is no document", where="data", do="name files that hold text")
    return Tokens(np.concatenate(ids), np.concatenate(learned), np.array(starts, dtype=np.int64))


def _chunks(items: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def load(section: DataSection, patterns: Sequence[str], hub: HubData | None, tokenizer: Any) -> Tokens:
    """Return the tokens of files or of a data set; those of files are kept for the next time.

    Raises:
        BadInput, Unavailable: see `files`, `read` and `hub_documents`.
    """
    if hub is not None:
        return tokenise(hub_documents(hub, section.field), tokenizer)
    found = files(patterns, "data")
    key = [_RECIPE, section.field, section.documents, _tokenizer_digest(tokenizer)]
    key += [[path.suffix, hashlib.sha256(path.read_bytes()).hexdigest()] for path in found]
    path = store.keyed("tokens", key).with_suffix(".npz")
    if path.is_file():
        with np.load(path) as kept:
            return Tokens(kept["ids"], kept["learned"], kept["starts"])
    tokens = tokenise((document for file in found for document in read(file, section)), tokenizer)

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as out:
            np.savez(out, ids=tokens.ids, learned=tokens.learned, starts=tokens.starts)

    store.write_file(path, write)
    return tokens


def _tokenizer_digest(tokenizer: Any) -> str:
    text = json.dumps([tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, type(tokenizer).__name__])
    return hashlib.sha256(text.encode()).hexdigest()
