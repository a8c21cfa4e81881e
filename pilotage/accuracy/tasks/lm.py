"""lm-eval's view of a model, for the three that level 1 needs: Hugging Face, our engine, our server.

All of them are asked with the same token ids, so that a difference between two of them is one of the models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pilotage.accuracy.arms import openai
from pilotage.core.errors import BadInput, Unsupported
from pilotage.core.progress import track

Pair = tuple[list[int], list[int]]
DEFAULT_NEW_TOKENS = 256
# Bytes of logits that a batch of Hugging Face's may hold, and its rows.
_LOGITS = 192 * 1024 * 1024
_ROWS = 16
# Prompts of one HTTP request.
_AT_ONCE = 32


class TaskLM(TemplateLM):
    """What the three share: tokens, windows and truncation.

    Args:
        tokenizer: the reference's; both arms use it.
        max_length: longest prompt with continuation, in tokens; longer prompts lose their beginning.
    """

    name: str

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.tokenizer, self.max_length = tokenizer, max_length
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        room = self.max_length - len(continuation)
        if room < 1:
            raise BadInput(
                f"a continuation of {len(continuation)} tokens does not fit {self.max_length}", where="--max-length"
            )
        self.truncated += len(context) > room
        return context[-room:], continuation

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.scores([self._cut(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        totals = []
        for request in requests:
            (string,) = request.args
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    token_list=self.tok_encode(string, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,
                    context_len=1,
                ),
            )
            totals.append(sum(value for value, _ in self.scores([(list(a), list(b)) for a, b in windows])))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        prompts: list[list[int]] = []
        counts: list[int] = []
        for index, request in enumerate(requests):
            context, options = request.args
            until = options.get("until") or []
            stop = tuple([until] if isinstance(until, str) else until)
            if options.get("do_sample") and options.get("temperature", 1.0):
                raise Unsupported(
                    "the task samples; two models' samples cannot be compared item by item",
                    where=str(getattr(request, "task_name", "task")),
                    do="set do_sample: false in its generation_kwargs",
                )
            counts.append(int(options.get("max_gen_toks", DEFAULT_NEW_TOKENS)))
            prompts.append(self._cut(self.tok_encode(context), [0] * min(counts[-1], self.max_length - 1))[0])
            counts[-1] = min(counts[-1], self.max_length - len(prompts[-1]))
            groups[stop].append(index)
        texts = [""] * len(requests)
        for stop, members in groups.items():
            said = self.completions([prompts[i] for i in members], [counts[i] for i in members], stop)
            for index, text in zip(members, said, strict=True):
                texts[index] = text
        return texts

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return log-probability and greediness of each continuation."""
        raise NotImplementedError

    def completions(self, prompts: Sequence[list[int]], counts: Sequence[int], stop: Sequence[str]) -> list[str]:
        """Continue prompts greedily up to a stop string, which is left out, or the end of the sequence."""
        raise NotImplementedError


class HFTaskLM(TaskLM):
    """Hugging Face, in batches of equal length: no padding, so no mask that could be wrong."""

    name = "hugging face"

    def __init__(self, model: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(tokenizer, max_length)
        self.model = model
        ids = model.generation_config.eos_token_id
        found = ids if isinstance(ids, list) else [ids]
        self.ends = {int(token) for token in [*found, tokenizer.eos_token_id] if token is not None}

    @torch.inference_mode()
    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        batches = self._batches(pairs)
        for batch in track(batches, "Hugging Face"):
            keep = max(len(pairs[index][1]) for index in batch)
            # The last token is never an input.
            ids = torch.tensor([[*pairs[index][0], *pairs[index][1]][:-1] for index in batch])
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits.float().log_softmax(-1)
            for row, index in enumerate(batch):
                tokens = torch.tensor(pairs[index][1])
                rows = logits[row, -len(tokens) :]
                told = rows.gather(-1, tokens[:, None])[:, 0]
                found[index] = (float(told.double().sum()), bool((rows.argmax(-1) == tokens).all()))
        return found

    def _batches(self, pairs: Sequence[Pair]) -> list[list[int]]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                raise BadInput("an empty context or continuation cannot be scored", where=f"request {index}")
            by_length[len(context) + len(continuation)].append(index)
        row = self.model.get_output_embeddings().weight.shape[0] * 4
        batches = []
        for members in by_length.values():
            members.sort(key=lambda index: len(pairs[index][1]))
            batch: list[int] = []
            for index in members:
                if batch and (len(batch) == _ROWS or (len(batch) + 1) * len(pairs[index][1]) * row > _LOGITS):
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        return batches

    @torch.inference_mode()
    def completions(self, prompts: Sequence[list[int]], counts: Sequence[int], stop: Sequence[str]) -> list[str]:
        return [
            self._complete(prompt, count, stop)
            for prompt, count in track(list(zip(prompts, counts, strict=True)), "Hugging Face")
        ]

    def _complete(self, prompt: list[int], count: int, stop: Sequence[str]) -> str:
        new, cache, said = torch.tensor([prompt]), None, list[int]()
        text = ""
        while len(said) < count:
            step = self.model(input_ids=new, use_cache=True, past_key_values=cache, logits_to_keep=1)
            cache, token = step.past_key_values, int(step.logits[0, -1].argmax())
            if token in self.ends:
                break
            said.append(token)
            new = torch.tensor([[token]])
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            if any(mark in text for mark in stop):
                break
        ends = [text.index(mark) for mark in stop if mark in text]
        return text[: min(ends)] if ends else text


class EngineTaskLM(TaskLM):
    """A vLLM engine in this process."""

    name = "engine"

    def __init__(self, llm: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__(tokenizer, max_length - 1)  # vLLM samples a token behind every prompt that it scores
        self.llm = llm

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        from pilotage.accuracy.arms import engine

        return engine.score(self.llm, pairs)

    def completions(self, prompts: Sequence[list[int]], counts: Sequence[int], stop: Sequence[str]) -> list[str]:
        from pilotage.accuracy.arms import engine

        return engine.complete(self.llm, prompts, counts, stop)


class ServerTaskLM(TaskLM):
    """A `vllm serve` process, over its completions endpoint.

    Args:
        url: root of the server.
        model: the name that it serves under.
        tokenizer: see `TaskLM`.
        max_length: see `TaskLM`.
    """

    name = "server"

    def __init__(self, url: str, model: str, tokenizer: Any, max_length: int) -> None:
        super().__init__(tokenizer, max_length - 1)
        self.url, self.model = f"{url.rstrip('/')}/v1/completions", model

    def _ask(self, prompts: Sequence[list[int]], **options: Any) -> list[dict[str, Any]]:
        """Send prompts in a few requests at a time; the server batches them."""
        parts = [list(prompts[start : start + _AT_ONCE]) for start in range(0, len(prompts), _AT_ONCE)]

        def send(part: list[list[int]]) -> list[dict[str, Any]]:
            body = {"model": self.model, "prompt": part, "temperature": 0, **options}
            choices = openai.post(self.url, body)["choices"]
            return sorted(choices, key=lambda choice: int(choice["index"]))

        with ThreadPoolExecutor(2) as pool:
            return [
                choice for choices in track(pool.map(send, parts), "server", total=len(parts)) for choice in choices
            ]

    def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        choices = self._ask(
            [[*context, *continuation] for context, continuation in pairs], max_tokens=1, prompt_logprobs=0
        )
        found = []
        for choice, (context, continuation) in zip(choices, pairs, strict=True):
            rows = choice["prompt_logprobs"][len(context) :]
            told = [row[str(token)] for row, token in zip(rows, continuation, strict=True)]
            found.append((sum(entry["logprob"] for entry in told), all(entry["rank"] == 1 for entry in told)))
        return found

    def completions(self, prompts: Sequence[list[int]], counts: Sequence[int], stop: Sequence[str]) -> list[str]:
        texts = [""] * len(prompts)
        for count in sorted(set(counts)):
            members = [index for index, other in enumerate(counts) if other == count]
            choices = self._ask([prompts[index] for index in members], max_tokens=count, stop=list(stop))
            for index, choice in zip(members, choices, strict=True):
                texts[index] = str(choice["text"])
        return texts
