"""The target arm: the real vLLM engine on this platform, made to follow the reference's tokens.

The continuation is forced inside the engine, so its decode steps, KV cache, buckets and compiled graphs are the ones
that serve, and the logits are read where they are computed, not through vLLM's log-probabilities.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.base import LayerKV, Stream
from pilotage.core.errors import PilotageError
from pilotage.core.nouns import Observation
from pilotage.core.store import read_json


class EngineArm:
    """vLLM with a model of this project, with the settings that the other commands use.

    Args:
        model: directory of the checkpoint.
        dtype: "bfloat16" or "float32".
        enforce_eager: run without compiling.
        options: arguments of `launch.engine` that replace the shared ones.
        kv: read keys and values from the paged cache as well.
    """

    name = "target"

    def __init__(
        self,
        model: Path,
        dtype: str,
        *,
        enforce_eager: bool = False,
        options: Mapping[str, Any] | None = None,
        kv: bool = False,
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.enforce_eager = enforce_eager
        self.options = dict(options or {})
        self.kv = kv

    def observe(self, streams: Sequence[Stream]) -> Observation:
        """Start an engine, run all streams as one batch, and read the logits at their positions.

        Raises:
            PilotageError: the engine did not start, or a position's logits are missing.
        """
        from pilotage.serving import settings
        from pilotage.serving.launch import engine

        arguments = {
            **settings.shared(self.model, self.dtype),
            # A hit would leave prompt rows uncomputed, and the streams may share a beginning.
            "enable_prefix_caching": False,
            **self.options,
            "enforce_eager": self.enforce_eager,
        }
        with (
            tempfile.TemporaryDirectory(prefix="pilotage-logits-") as directory,
            engine(self.model, **arguments) as llm,
        ):
            wanted = sorted({position for stream in streams for position in stream.positions})
            llm.collective_rpc("record_start", args=(directory, wanted))
            if self.kv:
                llm.collective_rpc("kv_read_start", args=(f"{directory}/kv",))
            self._run(llm, streams)
            kept = read_kv(llm.collective_rpc("kv_read_stop"), len(streams)) if self.kv else []
            files = llm.collective_rpc("record_stop")[0]
            logits = read_logits([Path(name) for name in files], Path(directory), streams)
            receipt = llm.collective_rpc("receipt")[0]
        return Observation(
            arm=self.name,
            dtype=self.dtype,
            logits=logits,
            positions=[list(stream.positions) for stream in streams],
            receipt=receipt,
            kv=kept,
        )

    def _run(self, llm: Any, streams: Sequence[Stream]) -> None:
        from vllm import SamplingParams

        params = []
        for stream in streams:
            forced = list(stream.tokens[stream.prompt :])
            params.append(
                SamplingParams(
                    temperature=0.0,
                    max_tokens=len(forced),
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={"pilotage_force": forced},
                )
            )
        prompts = [{"prompt_token_ids": list(stream.tokens[: stream.prompt])} for stream in streams]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for stream, output in zip(streams, outputs, strict=True):
            said = list(output.outputs[0].token_ids)
            if said != list(stream.tokens[stream.prompt :]):
                raise PilotageError(
                    f"the engine did not follow the forced tokens: {said[:8]}...", where="pilotage_force"
                )


def read_logits(files: Sequence[Path], directory: Path, streams: Sequence[Stream]) -> list[Tensor]:
    """Read what an engine recorded while it ran `streams`, in this order and nothing else.

    Returns:
        For each stream the logits [positions, V] at its positions.

    Raises:
        PilotageError: a position is missing.
    """
    from safetensors import safe_open

    # vLLM numbers the requests of a batch in order and appends a suffix of its own.
    numbers = [int(str(name).split("-")[0]) for name in read_json(directory / "requests.json")]
    order = {request: index for index, request in enumerate(sorted(range(len(numbers)), key=numbers.__getitem__))}
    rows: list[dict[int, Tensor]] = [{} for _ in streams]
    for path in files:
        with safe_open(path, framework="pt") as file:
            recorded = file.get_slice("logits")
            requests, positions = file.get_tensor("request"), file.get_tensor("position")
            for row, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
                number = order[request]
                if position in streams[number].positions:
                    # A recomputed row (after preemption) replaces the earlier one: it is what the cache then holds.
                    rows[number][position] = recorded[row : row + 1][0].clone()
    for index, stream in enumerate(streams):
        missing = [position for position in stream.positions if position not in rows[index]]
        if missing:
            raise PilotageError(
                f"the engine recorded no logits at {len(missing)} positions, the first is {missing[0]}",
                where=f"stream {index}",
            )
    return [
        torch.stack([rows[index][position] for position in stream.positions]) for index, stream in enumerate(streams)
    ]


def read_kv(kept: Sequence[Sequence[Mapping[str, str]]], count: int) -> list[list[LayerKV]]:
    """Read what the ranks kept of the caches of the last `count` requests, heads of all ranks joined.

    Args:
        kept: of each rank, what `kv_read_stop` returned.
        count: requests that ran.

    Raises:
        PilotageError: a request is missing.
    """
    by_rank = [{entry["request"]: entry["file"] for entry in entries} for entries in kept]
    order = sorted(by_rank[0], key=lambda name: int(name.split("-")[0]))
    if len(order) != count:
        raise PilotageError(f"the caches of {len(order)} requests were kept, {count} ran", where="kv_read_stop")
    return [_read_request([Path(files[request]) for files in by_rank]) for request in order]


def _read_request(files: Sequence[Path]) -> list[LayerKV]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(files[0], framework="pt") as file:
        first: dict[str, int] = json.loads(file.metadata()["first"])
    ranks = [load_file(path) for path in files]
    # Heads lie in rank order; where there are fewer of them than ranks, neighbours hold the same one.
    return [
        LayerKV(
            layer=name,
            first=start,
            keys=torch.cat([tensors[f"{name}.k"] for tensors in ranks], dim=1),
            values=torch.cat([tensors[f"{name}.v"] for tensors in ranks], dim=1),
        )
        for name, start in sorted(first.items(), key=lambda item: _numbers(item[0]))
    ]


def _numbers(name: str) -> list[int]:
    return [int(part) for part in name.split(".") if part.isdigit()]


class EngineGenerate:
    """A running engine as what `logit_validation` asks: raw logits, free or forced.

    Args:
        llm: from `launch.engine`.
        steps: tokens to generate when it is not forced.
    """

    def __init__(self, llm: Any, steps: int) -> None:
        self.llm, self.steps = llm, steps

    def __call__(self, ids: Any) -> tuple[Tensor, Tensor]:
        """Continue prompts greedily; returns logits [steps, batch, V] and tokens [batch, steps]."""
        return self._run(ids, None)

    def forced(self, ids: Any, tokens: Tensor) -> Tensor:
        """Return the logits [steps, batch, V] of decode steps that say `tokens` [steps, batch]."""
        return self._run(ids, tokens)[0]

    def _run(self, ids: Any, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        from vllm import SamplingParams

        prompts = [[int(token) for token in prompt] for prompt in ids]
        steps = self.steps if tokens is None else tokens.shape[0]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=steps,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if tokens is None else {"pilotage_force": tokens[:, row].tolist()},
            )
            for row in range(len(prompts))
        ]
        wanted = sorted({len(prompt) - 1 + step for prompt in prompts for step in range(steps)})
        with tempfile.TemporaryDirectory(prefix="pilotage-logits-") as directory:
            self.llm.collective_rpc("record_start", args=(directory, wanted))
            try:
                outputs = self.llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
                )
            finally:
                files = self.llm.collective_rpc("record_stop")[0]
            said = [list(output.outputs[0].token_ids) for output in outputs]
            streams = [
                Stream(
                    tokens=(*prompt, *found),
                    prompt=len(prompt),
                    positions=tuple(range(len(prompt) - 1, len(prompt) - 1 + steps)),
                )
                for prompt, found in zip(prompts, said, strict=True)
            ]
            rows = read_logits([Path(name) for name in files], Path(directory), streams)
        return torch.stack(rows, 1), torch.tensor(said)


def score(llm: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """Return for each (context, continuation) the continuation's log-probability, and whether greedy would say it."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": [*context, *continuation]} for context, continuation in pairs]
    found = []
    for output, (context, continuation) in zip(llm.generate(prompts, params, use_tqdm=False), pairs, strict=True):
        rows = output.prompt_logprobs[len(context) :]
        told = [row[token] for row, token in zip(rows, continuation, strict=True)]
        found.append((sum(entry.logprob for entry in told), all(entry.rank == 1 for entry in told)))
    return found


def complete(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stop: Sequence[str]) -> list[str]:
    """Continue prompts greedily, each by at most so many tokens, up to a stop string, which is left out."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=count, stop=list(stop) or None) for count in max_tokens]
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [output.outputs[0].text for output in llm.generate(requests, params, use_tqdm=False)]
