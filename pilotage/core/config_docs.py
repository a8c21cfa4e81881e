"""The text of docs/configuration.md, from the code: `python -m pilotage.core.config_docs > docs/configuration.md`."""

from __future__ import annotations

import dataclasses

from pilotage.core.config import TargetConfig

# Every environment variable that a user may set; tests hold this against what the code reads.
ENVIRONMENT = {
    "PILOTAGE_HOME": "Directory of what is built once and reused: converted checkpoints, tiny models, compiled "
    "graphs. Default: `~/.cache/pilotage`.",
    "PILOTAGE_COMPILE_CACHE": "Directory of the compiled graphs. Default: `compile` in `PILOTAGE_HOME`. "
    "Also read as `VLLM_NEURON_COMPILE_CACHE`.",
    "PILOTAGE_COMPILE_WORKERS": "Processes that the compiler may use. Default: one a core. "
    "Also read as `VLLM_NEURON_COMPILE_WORKERS`.",
    "PILOTAGE_DISABLE_WARMUP_COMPILE": "`1`: compile nothing, load every graph from the compile cache; one that is not "
    "there is an error. Also read as `VLLM_NEURON_DISABLE_WARMUP_COMPILE`.",
    "PILOTAGE_CPU_COMPILE": "`1`: a server or engine compiles all its graphs for the target that `PILOTAGE_TARGET` "
    "names, runs none of them, and the process ends with 0. Also read as `VLLM_NEURON_CPU_COMPILE`.",
    "PILOTAGE_DISABLE_KERNELS": "`1`: every operator runs its plain-torch definition. "
    "Also read as `VLLM_NEURON_DISABLE_KERNELS`.",
    "PILOTAGE_NUM_THREADS": "Compute threads of each rank. Default: `OMP_NUM_THREADS`, or the cores divided by the "
    "ranks.",
    "PILOTAGE_MEMORY_BYTES": "Memory that a rank's process may use in all; bounds its KV cache. Default: what is free "
    "on the machine and in the container.",
    "PILOTAGE_CHROMIUM": "Chromium that draws screenshots of reports. Default: the one found on the machine.",
    "PILOTAGE_TARGET": "`cpu`, `neuron` or `cuda`; the last two are untested on hardware. Default: `neuron` where "
    "`NEURON_PLATFORM_TARGET_OVERRIDE` names a chip, else the first of neuron and cuda whose packages and device are "
    "here, else `cpu`.",
    "PILOTAGE_DISABLE": "`1`: vLLM runs as if pilotage were not installed.",
    "TRITON_INTERPRET": "`1`: Triton kernels run on the CPU in Triton's interpreter, in fp32; slow. Read before the "
    "process imports triton.",
    "NKI_SIMULATOR": "`1`: NKI kernels run in the interpreter, our own for every operator they take; it answers to the "
    "names `nki` and `neuronxcc.nki` where the real packages are absent.",
    "NKI_PRECISE_FP": "`0`: the interpreter holds bfloat16 and 8-bit floats in float32, which tells a kernel's logic "
    "from its rounding.",
    "NEURON_PLATFORM_TARGET_OVERRIDE": "`trn1`, `trn2` or `trn3`: the core that the NKI interpreter stands for "
    "(default `trn2`); without `NKI_SIMULATOR=1` and `PILOTAGE_TARGET` it also means that target `neuron` is wanted.",
}

_HEAD = """# Configuration

Generated from the code by `python -m pilotage.core.config_docs`; a test compares.

## Settings of the target

They go to vLLM as `additional_config`, under `"pilotage"`; `"neuron_config"` is read as the same key.

    LLM(model, additional_config={"pilotage": {"num_seqs_buckets": [1, 8]}})
    vllm serve MODEL --additional-config '{"pilotage": {"num_seqs_buckets": [1, 8]}}'

An unknown key is an error that names the nearest known one.
"""

_DEFAULTS = """
## Defaults of vLLM that differ here

| argument | default | why |
|---|---|---|
| `block_size` | 32 | |
| `max_num_seqs` | 16 | 256 would be nine decode graphs, most of which a CPU never fills |
| `max_num_batched_tokens` | 2048 | each doubling is one more prefill graph |
| KV cache | room for `max_num_seqs` requests of `max_model_len` tokens, plus a quarter | at most \
`gpu_memory_utilization` of the memory that is free; `kv_cache_memory_bytes` sets it |

Not on this target, and refused: LoRA, pipeline parallelism, quantised weights or
caches, KV transfer.

## Environment variables
"""


def text() -> str:
    """Return the whole page."""
    fields = dataclasses.fields(TargetConfig)
    parts = [_HEAD, _table(fields), _DEFAULTS]
    rows = "".join(f"| `{name}` | {doc} |\n" for name, doc in ENVIRONMENT.items())
    parts.append("\n| variable | meaning |\n|---|---|\n" + rows)
    return "".join(parts)


def _table(fields: tuple[dataclasses.Field[object], ...]) -> str:
    rows = "".join(f"| `{item.name}` | `{item.default}` | {item.metadata['doc']} |\n" for item in fields)
    return "\n| key | default | meaning |\n|---|---|---|\n" + rows


if __name__ == "__main__":
    print(text(), end="")
