"""How a drafting model's token is chosen from its logits, and what its probability was, for the verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.worker.gpu_input_batch import InputBatch


class Choice:
    """The most likely token, or one drawn at the request's temperature.

    A certain draft counts as probability 1 in the verification; of a drawn one the whole distribution is kept. The
    output is distributed as without drafts either way.

    Args:
        drawn: draw for requests that sample; greedy ones get the most likely token.
    """

    def __init__(self, *, drawn: bool) -> None:
        self.drawn = drawn
        self._kept: dict[str, list[tuple[int, Tensor]]] = {}

    def forget(self, req_id: str) -> None:
        """Forget what was drafted for a request: something else is verified."""
        self._kept.pop(req_id, None)

    def choose(self, batch: InputBatch, rows: Sequence[int], logits: Tensor) -> dict[int, int]:
        """Choose the next draft of each row.

        Args:
            batch: vLLM's.
            rows: of the batch, one for each row of logits.
            logits: [rows, V].
        """
        logits = logits.float()
        tokens = logits.argmax(-1)
        if not self.drawn:
            return dict(zip(rows, tokens.tolist(), strict=True))
        for index, row in enumerate(rows):
            req_id = batch.req_ids[row]
            if req_id in batch.greedy_reqs:
                continue
            chances = (logits[index] / float(batch.temperature_cpu[row])).softmax(-1)
            noise = torch.empty_like(chances).exponential_(generator=batch.generators.get(row))
            tokens[index] = (chances / noise).argmax()
            self._kept.setdefault(req_id, []).append((-1, chances))
        tokens = _agreed(tokens)
        for index, row in enumerate(rows):
            if batch.req_ids[row] in self._kept:
                last = self._kept[batch.req_ids[row]]
                last[-1] = (int(tokens[index]), last[-1][1])
        return dict(zip(rows, tokens.tolist(), strict=True))

    def probabilities(self, req_ids: Sequence[str], drafts: Sequence[Sequence[int]], vocab_size: int) -> Tensor | None:
        """Return the distributions [all drafts, V] that drafts were drawn from; None where all of them were certain.

        Args:
            req_ids: of the batch.
            drafts: of each request; -1 for padding, which is rejected.
            vocab_size: V.
        """
        if not self.drawn:
            return None
        found = []
        for req_id, ids in zip(req_ids, drafts, strict=True):
            kept = self._kept.get(req_id, [])
            for number, token in enumerate(ids):
                if number < len(kept) and kept[number][0] == token:
                    found.append(kept[number][1])
                    continue
                certain = torch.zeros(vocab_size)
                if token >= 0:
                    certain[token] = 1.0
                found.append(certain)
        return torch.stack(found) if found else None


def _agreed(tokens: Tensor) -> Tensor:
    """Take the first rank's tokens on every rank: they go into every rank's next forward."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.broadcast(tokens, src=group.ranks[0], group=group.cpu_group)
    return tokens
