"""One declarative bijection between a checkpoint's tensors and a model's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pilotage.core.errors import WeightError
from pilotage.weights.rules import Drop, Identity, Rule, Tie, fill, match

_SHOWN = 3


@dataclass(frozen=True)
class Problem:
    """One way in which checkpoint and model do not fit.

    Attributes:
        kind: "missing", "extra", "double", "shape", "dtype" or "tie".
        name: the tensor or parameter.
        text: what is wrong with it.
    """

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Step:
    """One application of a rule: these checkpoint tensors become these parameters."""

    rule: Rule
    hf: tuple[str, ...]
    native: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a WeightMap does with one checkpoint and one model.

    Attributes:
        steps: applications of moving rules.
        ties: parameter -> checkpoint key it is read from besides that key's own parameter.
        drops: checkpoint key -> reason.
        copies: checkpoint key -> the key whose bytes it must repeat.
        problems: what does not fit; empty means that every tensor is consumed once and every parameter written once.
    """

    steps: tuple[Step, ...]
    ties: Mapping[str, str]
    drops: Mapping[str, str]
    copies: Mapping[str, str]
    problems: tuple[Problem, ...]

    def check(self) -> None:
        """Raise for the first problems.

        Raises:
            WeightError: naming the tensors concerned.
        """
        raise_problems(self.problems)


class WeightMap:
    """Rules that say, for every checkpoint tensor, which parameter it becomes or why it is dropped.

    Args:
        rules: of `pilotage.weights.rules`. The order does not matter: a tensor that two rules claim is an error, except
            that `Identity` takes only what no other rule names.
    """

    def __init__(self, rules: Iterable[Rule | Tie | Drop]) -> None:
        rules = list(rules)
        self.ties = [rule for rule in rules if isinstance(rule, Tie)]
        self.drops = [rule for rule in rules if isinstance(rule, Drop)]
        self.rules: list[Rule] = [rule for rule in rules if not isinstance(rule, Tie | Drop)]

    def plan(self, checkpoint_names: Iterable[str], parameter_names: Iterable[str] | None = None) -> Plan:
        """Match names; nothing is read.

        Args:
            checkpoint_names: all tensors of the checkpoint.
            parameter_names: all parameters of the model; None takes whatever the rules produce.
        """
        names = list(checkpoint_names)
        present = set(names)
        wanted = None if parameter_names is None else list(parameter_names)
        problems = [
            Problem("double", name, "the checkpoint holds it twice") for name, n in Counter(names).items() if n > 1
        ]
        ties, copies, tie_problems = self._ties(present, wanted)
        problems += tie_problems
        drops = {name: f"repeats {source} (tied)" for name, source in copies.items()}
        moving = []
        for name in dict.fromkeys(names):
            dropping = [rule for rule in self.drops if match(rule.hf_pattern, name) is not None]
            if name in copies:
                continue
            if dropping:
                drops[name] = dropping[0].reason
                first = any(rule.first for rule in dropping)
                if not first and any(not isinstance(rule, Identity) for rule, _, _ in self._claims(name, "hf")):
                    problems.append(Problem("double", name, "a rule uses it and another drops it"))
                continue
            moving.append(name)
        steps, step_problems = self._steps(moving, "hf")
        problems += step_problems
        if wanted is not None:
            problems += self._coverage(steps, ties, wanted, {problem.name for problem in step_problems})
        return Plan(tuple(steps), ties, drops, copies, tuple(problems))

    def mappings(self, checkpoint_names: Iterable[str], parameter_names: Iterable[str]) -> dict[str, str | list[str]]:
        """Return parameter -> checkpoint key, or list of keys where several are fused.

        This is what `SafetensorsCheckpoint.load_sharded_pipelined` takes. Values are the parameter loaders' business
        there; a rule that moves values (Transpose, Permute, Split) is applied by `load_into`.

        Raises:
            WeightError: a missing, extra or doubly used tensor or parameter, named.
        """
        plan = self.plan(checkpoint_names, parameter_names)
        plan.check()
        found: dict[str, str | list[str]] = {}
        for step in plan.steps:
            for native in step.native:
                found[native] = step.hf[0] if len(step.hf) == 1 else list(step.hf)
        return {**found, **plan.ties}

    def to_native(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn a whole checkpoint's tensors into whole parameters (not one rank's share).

        Raises:
            WeightError: an extra, missing, misshapen or doubly used tensor, named.
        """
        plan = self.plan(tensors)
        plan.check()
        for name, source in plan.copies.items():
            check_copy(name, tensors[name], source, tensors[source])
        result: dict[str, Tensor] = {}
        for step in plan.steps:
            parts = step.rule.to_native([tensors[name] for name in step.hf])
            result.update(zip(step.native, parts, strict=True))
        return result | {native: tensors[source] for native, source in plan.ties.items()}

    def to_hf(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn whole parameters into checkpoint tensors: the inverse of `to_native`, without what was dropped.

        Raises:
            WeightError: a parameter that no rule knows, or a tied one that differs from its source.
        """
        tied = {tie.native: tie.source for tie in self.ties}
        steps, problems = self._steps([name for name in parameters if name not in tied], "native")
        raise_problems(problems)
        result: dict[str, Tensor] = {}
        for step in steps:
            parts = step.rule.to_hf([parameters[name] for name in step.native])
            for name, part in zip(step.hf, parts, strict=True):
                if name in result:
                    raise WeightError("two rules write this checkpoint tensor", where=name)
                result[name] = part
        for native, source in tied.items():
            if native in parameters:
                if source not in result:
                    raise WeightError(f"tied to {source}, which no parameter gives", where=native)
                check_copy(native, parameters[native], source, result[source])
        return result

    @property
    def is_identity(self) -> bool:
        """Whether every parameter is the checkpoint tensor of its own name, or a tied one."""
        return all(isinstance(rule, Identity) for rule in self.rules)

    def drops_name(self, name: str) -> bool:
        """Whether a checkpoint tensor of this name is dropped."""
        return any(match(rule.hf_pattern, name) is not None for rule in self.drops)

    def hf_steps(self, names: Iterable[str], *, partial: tuple[type, ...] = ()) -> list[Step]:
        """Group checkpoint names into applications of rules.

        Args:
            names: without dropped and tied ones.
            partial: kinds of rules of which some tensors may be missing; their steps name all.

        Raises:
            WeightError: a name that no rule uses, or a missing one.
        """
        steps, problems = self._steps(list(names), "hf", partial)
        raise_problems(problems)
        return steps

    def native_steps(self, names: Iterable[str]) -> list[Step]:
        """Group parameter names, without tied ones, into applications of rules.

        Raises:
            WeightError: a name that no rule writes, or a missing one.
        """
        steps, problems = self._steps(list(names), "native")
        raise_problems(problems)
        return steps

    def _ties(
        self, present: set[str], wanted: Sequence[str] | None
    ) -> tuple[dict[str, str], dict[str, str], list[Problem]]:
        ties: dict[str, str] = {}
        copies: dict[str, str] = {}
        problems = []
        for tie in self.ties:
            if wanted is not None and tie.native not in wanted:
                problems.append(Problem("extra", tie.native, "tied, and the model has no such parameter"))
                continue
            if tie.native in present and tie.native != tie.source:
                copies[tie.native] = tie.source
            if tie.source in present:
                ties[tie.native] = tie.source
            else:
                problems.append(Problem("missing", tie.source, f"the tied parameter {tie.native} is read from it"))
        return ties, copies, problems

    def _claims(self, name: str, side: str) -> list[tuple[Rule, int, dict[str, str]]]:
        """Return (rule, position of its pattern, placeholder values) for each rule that names `name`."""
        found = []
        for rule in self.rules:
            patterns = rule.hf_patterns if side == "hf" else rule.native_patterns
            for position, pattern in enumerate(patterns):
                values = match(pattern, name)
                if values is not None:
                    found.append((rule, position, values))
        specific = [claim for claim in found if not isinstance(claim[0], Identity)]
        return specific or found

    def _steps(
        self, names: Sequence[str], side: str, partial: tuple[type, ...] = ()
    ) -> tuple[list[Step], list[Problem]]:
        """Group `names` (of one side) into applications of rules."""
        problems: list[Problem] = []
        groups: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Rule, dict[str, str], set[str]]] = {}
        for name in names:
            claims = self._claims(name, side)
            if not claims:
                problems.append(Problem("extra", name, "no rule uses it, and none drops it with a reason"))
                continue
            if len(claims) > 1:
                problems.append(Problem("double", name, f"{len(claims)} rules use it"))
            rule, _, values = claims[0]
            key = (self.rules.index(rule), tuple(sorted(values.items())))
            groups.setdefault(key, (rule, values, set()))[2].add(name)
        steps = []
        for rule, values, members in groups.values():
            step = Step(
                rule,
                tuple(fill(pattern, values) for pattern in rule.hf_patterns),
                tuple(fill(pattern, values) for pattern in rule.native_patterns),
            )
            needed = step.hf if side == "hf" else step.native
            lost = [] if isinstance(rule, partial) else [name for name in needed if name not in members]
            problems += [Problem("missing", name, f"{sorted(members)[0]} needs it beside it") for name in lost]
            if not lost:
                steps.append(step)
        return steps, problems

    def _coverage(
        self, steps: Sequence[Step], ties: Mapping[str, str], wanted: Sequence[str], known: set[str]
    ) -> list[Problem]:
        problems = []
        writes = Counter(native for step in steps for native in step.native)
        writes.update(list(ties))
        model = set(wanted)
        for step in steps:
            for native in step.native:
                if native not in model:
                    same = native == step.hf[0]
                    text = "the model has no such parameter" if same else f"it becomes {native}, which the model lacks"
                    problems.append(Problem("extra", step.hf[0], text))
        for name in wanted:
            if writes[name] > 1:
                sources = [key for step in steps if name in step.native for key in step.hf]
                sources += [ties[name]] if name in ties else []
                problems.append(Problem("double", name, f"written {writes[name]} times: by {', '.join(sources)}"))
            elif not writes[name]:
                problems += self._unwritten(name, known)
        return problems

    def _unwritten(self, name: str, known: set[str]) -> list[Problem]:
        tied = [tie.source for tie in self.ties if tie.native == name]
        claims = self._claims(name, "native")
        if tied or (claims and any(fill(p, claims[0][2]) in known for p in claims[0][0].hf_patterns)):
            return []  # the tensor it is read from is reported already
        if not claims:
            return [Problem("missing", name, "no rule writes this parameter")]
        rule, _, values = claims[0]
        sources = [fill(pattern, values) for pattern in rule.hf_patterns]
        if sources == [name]:
            return [Problem("missing", name, "the checkpoint has no such tensor and the model needs it")]
        return [Problem("missing", sources[0], f"the checkpoint has no such tensor; parameter {name} is read from it")]


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one error for `problems`, if there are any.

    Raises:
        WeightError: naming the first and, in the text, a few more.
    """
    if not problems:
        return
    first, *others = problems
    more = "; ".join(f"{problem.name}: {problem.text}" for problem in others[: _SHOWN - 1])
    rest = f"; and {len(others) - _SHOWN + 1} more" if len(others) >= _SHOWN else ""
    raise WeightError(
        f"{first.kind}: {first.text}" + (f" ({len(problems)} problems; {more}{rest})" if others else ""),
        where=first.name,
        do="compare config.json with the checkpoint: pilotage weights MODEL lists every tensor",
    )


def check_copy(name: str, copy: Tensor, source_name: str, source: Tensor) -> None:
    """Require that `copy` holds the bytes of `source`.

    Raises:
        WeightError: it does not.
    """
    if not same_bytes(copy, source):
        raise WeightError(
            f"tied to {source_name}, and holds other values",
            where=name,
            do="set tie_word_embeddings to false if the model has a head of its own",
        )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits; unlike `==`, NaN equals NaN and 0 differs from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
