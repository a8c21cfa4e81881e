"""Make a checkpoint with a fault that people really make when they convert or port a model.

    python examples/plant_fault.py window DIRECTORY

The model is `tiny:gemma3`; what is written is a copy of its checkpoint with one thing wrong. docs/accuracy.md finds
each of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from pilotage.arch import source

Tensors = dict[str, Tensor]


def window(config: dict[str, object], tensors: Tensors) -> None:
    """One key too many in the window: exclusive and inclusive bounds mixed up."""
    config["sliding_window"] = int(str(config["sliding_window"])) + 1


def norms(config: dict[str, object], tensors: Tensors) -> None:
    """Query and key norms multiplied by their stored weight, not by one plus it."""
    for name in tensors:
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            tensors[name] -= 1


def swap(config: dict[str, object], tensors: Tensors) -> None:
    """Keys and values of one layer in each other's place: a converter's mapping with two lines swapped."""
    key, value = (f"model.layers.3.self_attn.{name}_proj.weight" for name in "kv")
    tensors[key], tensors[value] = tensors[value], tensors[key]


FAULTS = {"window": window, "norms": norms, "swap": swap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=sorted(FAULTS))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    shutil.copytree(source.resolve("tiny:gemma3"), arguments.directory)
    config_path, weights_path = arguments.directory / "config.json", arguments.directory / "model.safetensors"
    config, tensors = json.loads(config_path.read_text()), load_file(weights_path)
    FAULTS[arguments.fault](config, tensors)
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, weights_path, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
