"""Pretrain a small model until it beats a trigram on text it has not seen, serve it, and validate it.

    python scripts/prove_training.py [--figure docs/training-loss.svg] [--out DIRECTORY] [--steps N]

The text is what ships with Python (examples/train/stdlib_text.py), the recipe examples/train/pretrain.yaml. The model
must reach a lower loss on the held-out tokens than a trigram with add-k smoothing over the same tokens, whose k is
chosen on those very tokens. Then `vllm serve` must go on from a prompt with the tokens that the training class would
choose, transformers must read the checkpoint and write one that the training class reads without a changed bit, and
`pilotage validate` must pass.

Exits with 0 if all of it holds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PILOTAGE = (sys.executable, "-m", "pilotage")
PROMPT = "Return True if the"
NEW_TOKENS = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep everything here")
    parser.add_argument("--figure", type=Path, help="draw the loss curve here")
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotage-prove-") as directory:
        result = prove(options.out or Path(directory), options.steps, options.figure)
    print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


def prove(out: Path, steps: int | None, figure: Path | None) -> dict[str, Any]:
    """Do all of it below `out`; returns what was measured."""
    times: dict[str, float] = {}
    corpus = out / "stdlib"
    with clock(times, "corpus"):
        sys.path.insert(0, str(ROOT / "examples" / "train"))
        import stdlib_text

        documents = stdlib_text.write(corpus)
    with clock(times, "train"):
        recipe = recipe_file(out, corpus, steps)
        trained = answer([*PILOTAGE, "train", str(recipe), "--json"])
    with clock(times, "trigram"):
        yardstick = trigram(corpus)
    if figure is not None:
        draw(out / "run", yardstick["loss"], figure)
    result = {"documents": documents, "trained": trained, "trigram": yardstick, "seconds": times}
    if trained["evaluation"] >= yardstick["loss"]:
        return {**result, "passed": False, "reason": "the trigram is better"}
    with clock(times, "serve"):
        result["served"] = serve(Path(trained["model"]))
    with clock(times, "round_trip"):
        result["round_trip"] = round_trip(Path(trained["model"]), out / "written-by-transformers")
    with clock(times, "validate"):
        validated = answer([*PILOTAGE, "validate", trained["model"], "--eager", "--json"])
    result["validated"] = {
        "status": validated["status"],
        "verdicts": sum(len(arm["verdicts"]) for arm in validated["arms"]) + len(validated["verdicts"]),
        "modules": len(validated["modules"]),
    }
    same = result["served"]["text"] == result["round_trip"]["text"]
    exact = not result["round_trip"]["parameters_differing"]
    return {**result, "passed": validated["status"] == "pass" and same and exact}


def recipe_file(out: Path, corpus: Path, steps: int | None) -> Path:
    """Write the example's recipe with paths below `out`."""
    import yaml

    values = yaml.safe_load((ROOT / "examples" / "train" / "pretrain.yaml").read_text())
    values["out"] = str(out / "run")
    values["model"]["tokenizer"] = str(corpus / "tokenizer")
    values["data"] |= {"train": [str(corpus / "train.jsonl")], "evaluation": [str(corpus / "held_out.jsonl")]}
    values["steps"] = steps or values["steps"]
    path = out / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def trigram(corpus: Path) -> dict[str, Any]:
    """Score the yardstick on the tokens that the model was scored on."""
    from transformers import AutoTokenizer

    from pilotage.training import sources
    from pilotage.training.recipe import DataSection
    from pilotage.training.trigram import add_k_loss, trigrams

    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    train, held = (
        sources.load(DataSection(), [str(corpus / f"{name}.jsonl")], None, tokenizer) for name in ("train", "held_out")
    )
    loss, k = add_k_loss(train, held, len(tokenizer))
    counts = {"train_tokens": len(train.ids), "held_out_tokens": len(trigrams(held))}
    return {"loss": loss, "k": k, "vocabulary": len(tokenizer), **counts}


def serve(model: Path) -> dict[str, Any]:
    """Ask `vllm serve` to go on from a prompt."""
    import urllib.request

    from pilotage.serving import settings
    from pilotage.serving.launch import server

    body = {"model": str(model), "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    with server(model, **{**settings.shared(model, "float32"), "enforce_eager": True}) as running:
        request = urllib.request.Request(
            f"{running.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return {"prompt": PROMPT, "text": json.load(response)["choices"][0]["text"]}


def round_trip(model: Path, written: Path) -> dict[str, Any]:
    """Let transformers read a checkpoint and write it, and the training class read that and go on from the prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pilotage.models import registry

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.save_pretrained(written)
    face = registry.training_class(theirs.config.architectures)
    ours, back = (face.from_pretrained(path, dtype=torch.float32).eval() for path in (model, written))
    tensors = ours.state_dict()
    odd = [name for name, value in back.state_dict().items() if not torch.equal(value, tensors[name])]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    said = back.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
    return {"parameters": len(tensors), "parameters_differing": odd, "text": tokenizer.decode(said, True)}


def draw(run: Path, yardstick: float, figure: Path) -> None:
    """Draw both losses over the steps, and the trigram's as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from pilotage.training import metrics

    lines = metrics.read(run)
    held = [line for line in lines if "evaluation_loss" in line]
    drawing, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], lw=0.8, label="training")
    axes.plot(
        [line["step"] for line in held], [line["evaluation_loss"] for line in held], "o-", label="held out", color="C3"
    )
    axes.axhline(yardstick, ls="--", color="gray", label="add-k trigram, held out")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, metadata={"Date": None} if figure.suffix == ".svg" else None)


def answer(command: list[str]) -> dict[str, Any]:
    """Run a command that prints JSON."""
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} left with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class clock:
    """Note how long a block took."""

    def __init__(self, times: dict[str, float], name: str) -> None:
        self.times, self.name = times, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.times[self.name] = round(time.perf_counter() - self.began, 1)


if __name__ == "__main__":
    sys.exit(main())
