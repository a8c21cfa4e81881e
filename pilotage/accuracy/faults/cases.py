"""What is run: clean runs over seeds and kernel choices, and the sample of faults that CI plants."""

from __future__ import annotations

from dataclasses import dataclass

from pilotage.accuracy.faults.fault import Fault
from pilotage.accuracy.faults.table import FAULTS

SAMPLE_FAULTS, SAMPLE_CLEAN = 12, 10
_ATTENTION = ("flash_attention", "segmented_attention", "attention_decode")
KERNELS: dict[str, dict[str, str]] = {
    "as served": {},
    "plain torch": {
        name: "torch" for name in (*_ATTENTION, "write_kv", "qkv_proj", "mlp", "linear", "o_proj", "lm_head")
    },
    "torch sdpa": {name: "sdpa" for name in _ATTENTION},
    "projections not packed": {},
}
MODELS = (
    *("deepseek_v3", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama3"),
    *("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
)
LOCALISED = ("as served",)  # clean runs in which localise and the module checks are asked as well


@dataclass(frozen=True, kw_only=True)
class Clean:
    """A run in which nothing is wrong.

    Attributes:
        model: tiny model. seed: of its weights. kernels: key of `KERNELS`.
        localised: localise and the module checks are asked as well.
    """

    model: str
    seed: int
    kernels: str
    localised: bool

    @property
    def id(self) -> str:
        """A name for files and messages."""
        return f"{self.model}@{self.seed} {self.kernels}".replace(" ", "-")


def clean_cases(count: int) -> list[Clean]:
    """List clean runs: every model and kernel choice for one seed after another; see `LOCALISED`."""
    found: list[Clean] = []
    for seed in range(count):
        for model in MODELS:
            for kernels in KERNELS:
                if len(found) == count:
                    return found
                found.append(Clean(model=model, seed=seed, kernels=kernels, localised=kernels in LOCALISED))
    return found


def sample() -> tuple[list[Fault], list[Clean]]:
    """Choose what CI runs: a fault of every component and of as many models, and a clean run of every model."""
    by_heading: dict[str, list[Fault]] = {}
    for fault in FAULTS:
        if fault.ranks == 1 and fault.fp32 and fault.subject != "drafts":  # an engine's start is not for every change
            by_heading.setdefault(fault.heading, []).append(fault)
    chosen: list[Fault] = []
    for turn in range(SAMPLE_FAULTS):
        for faults in by_heading.values():
            used = [fault.model for fault in chosen]
            left = [fault for fault in faults if fault not in chosen]
            if left and len(chosen) < SAMPLE_FAULTS and turn <= len(chosen):
                chosen.append(min(left, key=lambda fault: used.count(fault.model)))
    clean = [Clean(model=model, seed=1, kernels="as served", localised=i < 3) for i, model in enumerate(MODELS)]
    return chosen, clean[:SAMPLE_CLEAN]
