"""Tensor replacement: reference tensors handed onward inside a running model.

`TensorReplacer` holds the reference, flattened to one row a position, and builds what a forward needs from the
scheduler's positions: one gather a module, however the rows are batched. The interface is that of the tensor
replacement document; beyond it there is a mask of the rows that have a reference at all.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotage.core.errors import BadInput
from pilotage.core.tap import get_replacement_tensor, set_active_context
from pilotage.probe.captures import Captures

__all__ = [
    "ReplacementContext",
    "TensorReplacer",
    "flatten_steps",
    "get_replacement_tensor",
    "set_active_context",
]

# (prompt, module) -> the positions [rows] int64 that have a reference, ascending, and its rows [rows, ...].
Rows = tuple[Tensor, Tensor]


class ReplacementContext(dict[str, Tensor]):
    """What one forward hands onward: module name -> [slots, ...], zero in slots without a reference.

    Attributes:
        mask: [slots] bool, slots in which every module has a reference.
        masks: module name -> [slots] bool, slots in which it has one.
    """

    def __init__(self, values: Mapping[str, Tensor], masks: Mapping[str, Tensor], mask: Tensor) -> None:
        super().__init__(values)
        self.masks, self.mask = dict(masks), mask


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Which positions of each prompt have a row; shared by the modules that were captured alike.

    Attributes:
        starts, lengths: [prompts + 1] where a prompt's positions begin in `rows` and how many it has; the last entry
            stands for "no prompt" and has none.
        rows: [positions of all prompts + 1] the row of each position; `blank` where there is none.
        blank: number of the zero row at the end of the modules' tensors.
    """

    starts: Tensor
    lengths: Tensor
    rows: Tensor
    blank: int

    def find(self, prompt: Tensor, position: Tensor) -> Tensor:
        """Return the row of each (prompt, position); -1 is no prompt."""
        inside = (position >= 0) & (position < self.lengths[prompt])
        at = torch.where(inside, self.starts[prompt] + position, len(self.rows) - 1)
        return self.rows[at]


def flatten_steps(steps: Sequence[Tensor]) -> Tensor:
    """Flatten step-wise captures of one prompt and module to one row a position.

    Args:
        steps: step 0 is the prefill [1, prompt length, ...]; each later one [1, tokens so far, ...], of which only the
            last row is new.

    Returns:
        [positions, ...].
    """
    if not steps:
        raise BadInput("a capture without steps", where="reference_captures")
    parts = [_without_batch(steps[0]), *(_without_batch(step)[-1:] for step in steps[1:])]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _without_batch(step: Tensor) -> Tensor:
    if step.ndim >= 3:
        if step.shape[0] != 1:
            raise BadInput(f"a step of shape {list(step.shape)}; one prompt a capture", where="reference_captures")
        return step[0]
    return step


class TensorReplacer:
    """Reference tensors, and the contexts built from them.

    Args:
        reference_captures: one dictionary a prompt, module name -> steps, see `flatten_steps`; a tensor instead of a
            list is a single step.
        prompt_token_ids: token ids of each prompt, by which requests are recognised.
        convert: called with (module, rows [positions, ...]), e.g. to give them the dtype of the target.

    Raises:
        BadInput: the two do not fit together, or a module's rows differ in shape between prompts.
    """

    def __init__(
        self,
        reference_captures: Sequence[Mapping[str, Sequence[Tensor] | Tensor]],
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        *,
        convert: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        prompts = [[int(token) for token in ids] for ids in prompt_token_ids or []]
        if prompt_token_ids is not None and len(prompts) != len(reference_captures):
            raise BadInput(
                f"{len(reference_captures)} captures for {len(prompts)} prompts",
                where="prompt_token_ids",
                do="give the token ids of every captured prompt, in the same order",
            )
        rows: list[dict[str, Rows]] = []
        for number, capture in enumerate(reference_captures):
            found = {}
            for module, steps in capture.items():
                steps = [steps] if isinstance(steps, Tensor) else list(steps)
                flat = flatten_steps(steps)
                if prompts and _without_batch(steps[0]).shape[0] != len(prompts[number]):
                    warnings.warn(
                        f"prompt {number}, {module}: step 0 has {_without_batch(steps[0]).shape[0]} rows and the "
                        f"prompt {len(prompts[number])} tokens; row i is taken as position i",
                        stacklevel=2,
                    )
                found[module] = (torch.arange(flat.shape[0]), flat if convert is None else convert(module, flat))
            rows.append(found)
        self._build(rows, prompts)

    @classmethod
    def from_captures(
        cls,
        captures: Captures,
        *,
        sites: Sequence[str] | None = None,
        convert: Callable[[str, Tensor], Tensor] | None = None,
    ) -> TensorReplacer:
        """Take the reference from captures on disk; positions that were not captured have no reference.

        Args:
            captures: of the reference arm. Requests with the same prompt are one prompt, its longest one.
            sites: which of its sites; None for all.
            convert: called with (site, rows) as they are read, e.g. to give them the dtype of the target.
        """
        chosen: dict[tuple[int, ...], str] = {}
        for name, prompt in captures.requests.items():
            key = tuple(prompt)
            if key not in chosen or len(captures.tokens(name)[0]) > len(captures.tokens(chosen[key])[0]):
                chosen[key] = name
        rows: list[dict[str, Rows]] = []
        for name in chosen.values():
            found = {}
            for site in captures.sites if sites is None else sites:
                positions, values = captures.get(name, site)
                if len(positions):
                    found[site] = (positions, values if convert is None else convert(site, values))
            rows.append(found)
        self = cls.__new__(cls)
        self._build(rows, [list(prompt) for prompt in chosen])
        with contextlib.suppress(BadInput):  # nobody noted tokens: they are then not compared
            self._tokens = [captures.tokens(name) for name in chosen.values()]
        return self

    def _build(self, captures: Sequence[Mapping[str, Rows]], prompts: list[list[int]]) -> None:
        self.prompts = prompts
        # By prompt, positions and the tokens that were fed there; known from captures on disk.
        self._tokens: list[tuple[Tensor, Tensor]] = []
        self.num_prompts = len(captures)
        self._by_length: dict[int, dict[tuple[int, ...], int]] = {}
        for number, prompt in enumerate(prompts):
            self._by_length.setdefault(len(prompt), {}).setdefault(tuple(prompt), number)
        self._lengths = sorted(self._by_length, reverse=True)
        self._requests: dict[str, int] = {}
        self._layouts: list[_Layout] = []
        self._layout_of: dict[str, int] = {}
        self._flat: dict[str, Tensor] = {}
        self._pool: dict[tuple[int, torch.device], list[dict[str, Tensor]]] = {}
        self._counts: Counter[str] = Counter()
        known: dict[tuple[bytes | None, ...], int] = {}
        for module in dict.fromkeys(name for capture in captures for name in capture):
            parts = [capture.get(module) for capture in captures]
            signature = tuple(None if part is None else part[0].numpy().tobytes() for part in parts)
            if signature not in known:
                known[signature] = len(self._layouts)
                self._layouts.append(_layout([None if part is None else part[0] for part in parts]))
            self._layout_of[module] = known[signature]
            values = [part[1] for part in parts if part is not None]
            shapes = {tuple(value.shape[1:]) for value in values}
            if len(shapes) > 1:
                raise BadInput(f"rows of different shapes, {sorted(shapes)}", where=module)
            self._flat[module] = torch.cat([*values, values[0].new_zeros(1, *values[0].shape[1:])])
        self._on: dict[torch.device, tuple[list[_Layout], dict[str, Tensor]]] = {}

    @property
    def modules(self) -> list[str]:
        """Names that have a reference."""
        return list(self._flat)

    def row_types(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of one row of each module."""
        return {name: (tuple(value.shape[1:]), value.dtype) for name, value in self._flat.items()}

    def register_request(self, req_id: str, prompt_token_ids: Sequence[int], *, prompt: int | None = None) -> int:
        """Find the reference of a request: the longest stored prompt that its tokens begin with.

        Token content decides, never a hash alone.

        Args:
            req_id: the engine's id, as later given to `build_context`.
            prompt_token_ids: its tokens; more than a stored prompt when a caller prompts again with forced tokens.
            prompt: index of the stored prompt, where the caller knows it: settles which one is meant when the tokens
                complete another, longer one.

        Returns:
            The index of the prompt.

        Raises:
            KeyError: the tokens begin with no stored prompt, or not with the one named.
        """
        tokens = tuple(int(token) for token in prompt_token_ids)
        if prompt is not None:
            if not 0 <= prompt < len(self.prompts) or tokens[: len(self.prompts[prompt])] != tuple(
                self.prompts[prompt]
            ):
                raise KeyError(f"request {req_id!r}: its tokens do not begin with those of prompt {prompt}")
            self._requests[req_id] = prompt
            return prompt
        for length in self._lengths:
            if length <= len(tokens):
                found = self._by_length[length].get(tokens[:length])
                if found is not None:
                    self._requests[req_id] = found
                    return found
        raise KeyError(f"request {req_id!r}: its tokens begin with none of the {len(self.prompts)} stored prompts")

    def forget_request(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self._requests.pop(req_id, None)

    def _resolve_prompt_idx(self, req_id: str) -> int:
        return self._requests[req_id]

    def warmup_context(self, num_tokens: int, device: torch.device | str = "cpu") -> ReplacementContext:
        """Return a context of the right shapes without any reference, for tracing.

        Args:
            num_tokens: slots of the bucket.
            device: where it is wanted.
        """
        context = self._context(num_tokens, torch.device(device))
        for value in (*context.values(), *context.masks.values(), context.mask):
            value.zero_()
        return context

    def build_context(
        self,
        req_ids: Sequence[str],
        positions: Sequence[int] | Tensor,
        is_prefill: bool,
        device: torch.device | str = "cpu",
        tokens_per_req: int = 1,
        *,
        slot_req: Sequence[int] | Tensor | None = None,
    ) -> ReplacementContext:
        """Build what one forward hands onward.

        Args:
            req_ids: requests of the forward.
            positions: [slots] absolute position of each slot, padding included.
            is_prefill: without `slot_req`: all slots belong to the one request, and the first position that repeats
                an earlier one is where padding starts.
            device: where the tensors are wanted.
            tokens_per_req: without `slot_req`, in a decode: slot i belongs to request i // tokens_per_req, and slots
                past the last request are padding.
            slot_req: [slots] the index into `req_ids` of each slot, -1 for padding; settles it for any batch.

        Returns:
            The context. Its tensors are used again once nobody holds it any more.

        Raises:
            BadInput: a prefill of several requests without `slot_req`.
        """
        where = torch.device(device)
        position = torch.as_tensor(positions, device="cpu").long()
        if slot_req is not None:
            owner = torch.as_tensor(slot_req, device="cpu").long()
            if owner.shape != position.shape:
                raise BadInput(f"{len(owner)} owners for {len(position)} slots", where="slot_req")
        elif is_prefill:
            if len(req_ids) != 1:
                raise BadInput(
                    f"a prefill of {len(req_ids)} requests", where="build_context", do="say with slot_req whose each is"
                )
            owner = torch.zeros(len(position), dtype=torch.int64)
            owner[_first_repeated(position) :] = -1
        else:
            owner = torch.arange(len(position)) // tokens_per_req
            owner[owner >= len(req_ids)] = -1
        context = self._context(len(position), where)
        self.fill(context, req_ids, position, owner)
        return context

    def fill(
        self,
        context: ReplacementContext,
        req_ids: Sequence[str],
        positions: Tensor,
        slot_req: Tensor,
        *,
        modules: Sequence[str] | None = None,
        counted: bool = True,
    ) -> None:
        """Overwrite a context, in place.

        Args:
            context: with the shapes of `_context`; masks may be shared or one a module.
            req_ids, slot_req: as for `build_context`.
            positions: [slots] int64.
            modules: fill these only; None for all of the replacer's.
            counted: add the rows to the receipt.
        """
        names = self.modules if modules is None else modules
        owners = torch.tensor([self._requests.get(req_id, -1) for req_id in req_ids] or [-1])
        prompt = torch.where(slot_req >= 0, owners[slot_req.clamp(min=0)], -1)
        layouts, flat = self._placed(context.mask.device)
        prompt, positions = prompt.to(context.mask.device), positions.to(context.mask.device)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for number in dict.fromkeys(self._layout_of[name] for name in names):
            rows = layouts[number].find(prompt, positions)
            found[number] = (rows, rows != layouts[number].blank)
        done: set[int] = set()
        for name in names:
            rows, mask = found[self._layout_of[name]]
            torch.index_select(flat[name], 0, rows, out=context[name])
            target = context.masks[name]
            if id(target) not in done:
                target.copy_(mask)
                done.add(id(target))
        whole = torch.ones_like(context.mask)
        for _, mask in found.values():
            whole &= mask
        context.mask.copy_(whole)
        if counted:
            self._count(slot_req, prompt, whole)

    def differs(self, req_ids: Sequence[str], positions: Tensor, slot_req: Tensor, tokens: Tensor) -> Tensor:
        """Tell in which slots [slots] another token is fed than the reference was.

        Args:
            req_ids, positions, slot_req: as for `fill`.
            tokens: [slots].

        Returns:
            bool; False as well where the reference's token is not known.
        """
        found = torch.zeros(len(slot_req), dtype=torch.bool)
        for number, req_id in enumerate(req_ids):
            prompt = self._requests.get(req_id, -1)
            if not 0 <= prompt < len(self._tokens) or not len(self._tokens[prompt][0]):
                continue
            known, fed = self._tokens[prompt]
            at = torch.searchsorted(known, positions).clamp(max=max(len(known) - 1, 0))
            mine = (slot_req == number) & (known[at] == positions)
            found |= mine & (fed[at] != tokens)
        return found

    def _count(self, slot_req: Tensor, prompt: Tensor, whole: Tensor) -> None:
        real = int((slot_req >= 0).sum())
        known, replaced = int((prompt >= 0).sum()), int(whole.sum())
        self._counts.update(
            {"replaced": replaced, "missed": known - replaced, "live": real - known, "padding": len(slot_req) - real}
        )

    def receipt(self) -> dict[str, int]:
        """Count the rows of all contexts built so far.

        Returns:
            `replaced`: every module had a reference; `missed`: of a known prompt, but some module had none;
            `live`: of a request that is none of the prompts; `padding`.
        """
        return {name: self._counts[name] for name in ("replaced", "missed", "live", "padding")}

    def _placed(self, device: torch.device) -> tuple[list[_Layout], dict[str, Tensor]]:
        if device.type == "cpu":
            return self._layouts, self._flat
        if device not in self._on:
            layouts = [
                _Layout(
                    starts=item.starts.to(device),
                    lengths=item.lengths.to(device),
                    rows=item.rows.to(device),
                    blank=item.blank,
                )
                for item in self._layouts
            ]
            self._on[device] = layouts, {name: value.to(device) for name, value in self._flat.items()}
        return self._on[device]

    def _context(self, slots: int, device: torch.device) -> ReplacementContext:
        """Return a context to be filled: on tensors of an earlier one that nobody holds any more, or on new ones."""
        pool = self._pool.setdefault((slots, device), [])
        tensors = next((item for item in pool if _unused(item)), None)
        if tensors is None:
            tensors = {
                name: torch.empty((slots, *value.shape[1:]), dtype=value.dtype, device=device)
                for name, value in self._flat.items()
            }
            masks = {
                f"@{number}": torch.empty(slots, dtype=torch.bool, device=device)
                for number in (-1, *range(len(self._layouts)))
            }
            tensors.update(masks)
            if len(pool) < 2:  # a caller that keeps its contexts must not make this one keep them, too
                pool.append(tensors)
        return ReplacementContext(
            {name: tensors[name] for name in self._flat},
            {name: tensors[f"@{number}"] for name, number in self._layout_of.items()},
            tensors["@-1"],
        )


def _unused(tensors: dict[str, Tensor]) -> bool:
    # Two references: the dictionary's and the argument of getrefcount. A view holds the storage instead.
    return all(sys.getrefcount(tensors[name]) <= 2 and _storage_users(tensors[name]) <= 1 for name in tensors)


def _storage_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users - 1  # without `storage` itself


def _layout(positions: Sequence[Tensor | None]) -> _Layout:
    total = sum(len(item) for item in positions if item is not None)
    starts, lengths, rows = [], [], []
    begin = row = 0
    for item in positions:
        length = int(item[-1]) + 1 if item is not None and len(item) else 0
        at = torch.full((length,), total, dtype=torch.int64)
        if item is not None and len(item):
            at[item] = torch.arange(row, row + len(item))
            row += len(item)
        starts.append(begin)
        lengths.append(length)
        rows.append(at)
        begin += length
    rows.append(torch.tensor([total]))
    return _Layout(
        starts=torch.tensor([*starts, 0]), lengths=torch.tensor([*lengths, 0]), rows=torch.cat(rows), blank=total
    )


def _first_repeated(positions: Tensor) -> int:
    """Return the first index whose position stood at an earlier index; the number of slots if there is none."""
    ordered, order = positions.sort(stable=True)
    repeats = order[1:][ordered[1:] == ordered[:-1]]
    return int(repeats.min()) if len(repeats) else len(positions)
