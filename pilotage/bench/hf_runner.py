"""Hugging Face on the same prompts: `python -m pilotage.bench.hf_runner CHECKPOINT DTYPE`, asked through `bench.child`.

What a user of transformers would write: the prompts of a batch padded on the left, `generate` with its cache, all
cores.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

from pilotage.bench.child import serve


class Runner:
    """The model of a checkpoint."""

    def __init__(self, checkpoint: str, dtype: str) -> None:
        import torch
        import transformers

        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(len(os.sched_getaffinity(0)))
        transformers.logging.set_verbosity_error()
        self.torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
        # The weights are mapped from the file. While other arms have their turn the system may drop such pages, and
        # reading them again would count as time to the first token.
        for parameter in self.model.parameters():
            parameter.data = parameter.data.clone()
        self.processors = transformers.LogitsProcessorList
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Generate for `prompts` in batches of `concurrency`, or describe the runner when there are none.

        Returns:
            Per request `starts`, `ttfts`, `decode` (first token to last) and `gaps` (token to token) in seconds, and
            `output_lens`; `duration`.
        """
        if "prompts" not in question:
            return {"versions": self.versions, "threads": self.torch.get_num_threads()}
        prompts, lengths, at_once = question["prompts"], question["output_lens"], question["concurrency"]
        ttfts: list[float] = []
        decode: list[float] = []
        starts: list[float] = []
        gaps: list[list[float]] = []
        start = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            last = min(first + at_once, len(prompts))
            began = time.perf_counter()
            times = self._generate(prompts[first:last], max(lengths[first:last]))
            for length in lengths[first:last]:
                ttfts.append(times[0])
                # A static batch goes on until its longest answer is done; each request counts to its own last token.
                decode.append(times[length - 1] - times[0])
                starts.append(began)
                gaps.append([b - a for a, b in itertools.pairwise(times[:length])])
        duration = time.perf_counter() - start
        known = {"starts": starts, "ttfts": ttfts, "decode": decode, "gaps": gaps}
        return {**known, "output_lens": lengths, "duration": duration}

    def _generate(self, prompts: list[str], new_tokens: int) -> list[float]:
        """Return the seconds after which each token of the batch was there."""
        times: list[float] = []
        start = time.perf_counter()

        def stamp(input_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter() - start)
            return scores

        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with self.torch.inference_mode():
            self.model.generate(
                **inputs,
                do_sample=False,
                top_k=None,
                top_p=None,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                logits_processor=self.processors([stamp]),
            )
        return times


if __name__ == "__main__":
    serve(Runner(*sys.argv[1:3]).answer)
