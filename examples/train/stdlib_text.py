"""Write a small corpus from text that ships with Python: `python stdlib_text.py DIRECTORY`.

It holds the docstrings of the standard library and the language reference that `pydoc` prints, as train.jsonl and
held_out.jsonl, and a byte-level BPE tokenizer that has seen the training text alone.

A tenth is held out, by whole modules and whole topics and not by documents: docstrings of one module share names and
phrases, and a model that has seen half of them would know the rest. A held-out text that also stands in the training
text, word for word, is left out of both counts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 1024
SPECIAL = ["<pad>", "<eos>", "<bos>"]
SHORTEST = 40  # characters; below this a docstring says little
# Not the library's own text, or tests of it.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}


def documents() -> Iterator[tuple[str, str]]:
    """Yield (group, text): docstrings by top-level module, reference topics by name."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if LEFT_OUT & set(parts) or parts[0] == "pydoc_data":
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) >= SHORTEST:
                    yield parts[0].removesuffix(".py"), text
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        for part in text.split("\n\n\n"):
            if len(part) >= SHORTEST:
                yield f"topic {name}", part


def held_out(group: str) -> bool:
    """Whether a group is never trained on: one in ten, by a hash of its name."""
    return hashlib.sha256(group.encode()).digest()[0] % 10 == 0


def write(directory: Path) -> dict[str, int]:
    """Write the corpus and the tokenizer; returns the number of documents on either side."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    train: dict[str, None] = {}
    held: dict[str, None] = {}
    for group, text in documents():
        (held if held_out(group) else train)[text] = None
    held = {text: None for text in held if text not in train}
    for name, texts in (("train", train), ("held_out", held)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(train, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=1024
    )
    fast.save_pretrained(directory / "tokenizer")
    return {"train": len(train), "held_out": len(held)}


if __name__ == "__main__":
    print(json.dumps(write(Path(sys.argv[1]))))
