"""The target arm: the real vLLM engine on this platform, made to follow the reference's tokens.

The continuation is forced inside the engine, so its decode steps, KV cache, buckets and compiled graphs are the ones
that serve, and the logits are read where they are computed, not through vLLM's log-probabilities.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pilotage.accuracy.arms.base import Stream
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
    """

    name = "target"

    def __init__(
        self, model: Path, dtype: str, *, enforce_eager: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.enforce_eager = enforce_eager
        self.options = dict(options or {})

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
            self._run(llm, streams)
            files = llm.collective_rpc("record_stop")[0]
            logits = self._read([Path(name) for name in files], Path(directory), streams)
            receipt = llm.collective_rpc("receipt")[0]
        return Observation(
            arm=self.name,
            dtype=self.dtype,
            logits=logits,
            positions=[list(stream.positions) for stream in streams],
            receipt=receipt,
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

    def _read(self, files: Sequence[Path], directory: Path, streams: Sequence[Stream]) -> list[Tensor]:
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
            torch.stack([rows[index][position] for position in stream.positions])
            for index, stream in enumerate(streams)
        ]
