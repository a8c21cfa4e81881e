"""Does a model train right when it is divided, saved and resumed? Each check names what is wrong.

Several real processes train tiny steps on every kind of mesh and are held against one process that does the same with
nothing but torch: loss, every gradient, the common norm, the weights. A loss alone finds few of these mistakes, and the
first loss finds none of those that are in the backward pass.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

RANKS = 2
MESHES: tuple[dict[str, Any], ...] = ({"tp": 2}, {"dp": 2}, {"pp": 2})
STEPS, ROWS, LENGTH, MICRO_ROWS = 2, 8, 24, 2
LR, MAX_NORM = 1e-3, 0.5
# Relative L2, or relative: fp32 sums in another order stay below a tenth of these on tiny checkpoints.
GRADIENT = NORM = HIDDEN = 1e-4
LOSS = 1e-5
# Of the change of a parameter in all steps. Adam divides by gradients that may be near zero: the bias of keys, whose
# gradient nearly cancels, has moved otherwise by 0.023 where nothing was wrong.
MOVED = 0.1


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something that a check found.

    Attributes:
        check: "loss", "gradients", "norm", "weights", "boundary", "tie", "buffers", "adapter" or "resume".
        culprit: what it names: a parameter, buffer, stage or part of the step.
        what: in words.
        size: by how much, in the check's own measure; the largest is named first.
    """

    check: str
    culprit: str
    what: str
    size: float


def batches(vocabulary: int) -> list[dict[str, Tensor]]:
    """Make batches of packed documents in which rows have unequal numbers of targets."""
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(4, vocabulary, (ROWS, LENGTH + 1), generator=generator)
        labels, positions = ids[:, 1:].clone(), torch.arange(LENGTH).repeat(ROWS, 1)
        for row in range(ROWS):
            cut = int(torch.randint(5, LENGTH - 3, (1,), generator=generator))
            positions[row, cut:] -= cut
            labels[row, cut - 1] = -100
            labels[row, : 2 * row] = -100
        found.append({"input_ids": ids[:, :-1].clone(), "labels": labels, "position_ids": positions})
    return found


def load(path: Path) -> Any:
    """Load the training class of a checkpoint in fp32."""
    from pilotage.accuracy.arms import hf
    from pilotage.models import registry

    names = json.loads((path / "config.json").read_text()).get("architectures") or []
    with hf.quiet():
        return registry.training_class(names).from_pretrained(path, dtype=torch.float32).train()


def plain(model: Any, given: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Train one process with torch alone: each batch whole, its mean loss, torch's clipping, AdamW."""
    optimizer = _adamw(model.parameters())
    out: dict[str, Any] = {"losses": [], "norms": [], "hidden": []}
    hooks = [
        layer.register_forward_hook(lambda *args: out["hidden"].append(args[2].detach())) for layer in _layers(model)
    ]
    out["start"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step, batch in enumerate(given):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
            for hook in hooks:
                hook.remove()
        out["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        out["losses"].append(float(loss.detach()))
    out["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, betas=(0.9, 0.95), foreach=False)


def _layers(model: Any) -> list[Any]:
    return list(model.model.layers)


def meshed(path: Path, mesh: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Alarm]:
    """Train on a mesh in this process, one of those that form it, and compare with `plain`."""
    from pilotage.training.engine import Batch, Engine, full
    from pilotage.training.mesh import Parallel, make_mesh

    model = load(path)
    parallel = Parallel(**mesh)
    place = make_mesh(parallel)
    engine = Engine(model, place, parallel)
    optimizer = _adamw(engine.parameters().values())
    sent: list[Tensor] = []
    if place.pp > 1:
        hook = engine.stage.register_forward_hook(lambda *args: sent.append(args[2].detach()))
    said: dict[str, Any] = {"losses": [], "norms": []}
    for step, batch in enumerate(batches(model.config.vocab_size)):
        own = {name: value.chunk(place.dp)[place.dp_rank] for name, value in batch.items()}
        count = own["input_ids"].shape[0] // MICRO_ROWS
        parts = [Batch(**{name: value.chunk(count)[i] for name, value in own.items()}) for i in range(count)]
        optimizer.zero_grad()
        said["losses"].append(engine.forward_backward(parts))
        if step == 0:
            gradients = engine.gradients()
            if place.pp > 1:
                hook.remove()
        said["norms"].append(engine.clip(MAX_NORM))
        optimizer.step()
    weights = engine.gathered({name: full(p.detach()) for name, p in engine.parameters().items()})
    found = _boundary(engine, sent, expected) if place.pp > 1 else []
    return [*found, *compare(said, gradients, weights, expected)]


def compare(
    said: Mapping[str, Any], gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor], expected: Mapping[str, Any]
) -> list[Alarm]:
    """Compare losses, gradients, norms and weights with those of one process. Pure."""
    alarms = [
        Alarm(check="gradients", culprit=name, what=_gradient_words(gradients.get(name), value), size=off)
        for name, value in expected["gradients"].items()
        if not (off := _off(gradients.get(name), value)) <= GRADIENT
    ]
    # Of the first step: what comes later follows from gradients.
    loss = abs(said["losses"][0] - expected["losses"][0])
    if not loss <= LOSS:
        first = f"{said['losses'][0]:.6f} at the first step, one process has {expected['losses'][0]:.6f}"
        alarms.append(Alarm(check="loss", culprit="loss", what=first, size=loss))
    norm = max(abs(a - b) / b for a, b in zip(said["norms"], expected["norms"], strict=True))
    if not norm <= NORM and not alarms:
        what = f"{said['norms'][0]:.6f} over all parameters at the first step, one process has "
        what += f"{expected['norms'][0]:.6f}, and each gradient is right"
        alarms.append(Alarm(check="norm", culprit="gradient norm", what=what, size=norm))
    if not alarms:
        start = expected["start"]
        for name, value in expected["weights"].items():
            off = _off(weights.get(name, start[name]) - start[name], value - start[name])
            if not off <= MOVED:
                what = f"moved otherwise in {STEPS} steps by {off:.2g} of the way"
                alarms.append(Alarm(check="weights", culprit=name, what=what, size=off))
    return alarms


def _off(got: Tensor | None, expected: Tensor) -> float:
    if got is None:
        return float("inf")
    return float((got - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _gradient_words(got: Tensor | None, expected: Tensor) -> str:
    if got is None:
        return "has no gradient"
    scale = float((got * expected).sum() / expected.square().sum())
    if _off(got / scale if scale else got, expected) <= GRADIENT:
        return f"its gradient is {scale:.4g} times what it should be"
    return f"its gradient is off by {_off(got, expected):.2g} of its norm, whose length is {scale:.3g} of the right one"


def _boundary(engine: Any, sent: Sequence[Tensor], expected: Mapping[str, Any]) -> list[Alarm]:
    """Compare what a stage sends on with what one process has there, and say which dtype it went through."""
    mesh, alarms = engine.mesh, []
    if not mesh.last_stage:
        from pilotage.training.pipeline import layers_of_stage

        last = layers_of_stage(len(engine.model.model.layers), mesh.pp_rank, mesh.pp)[-1]
        # A pipeline runs a stage once more, before the first micro-batch, to learn the shapes.
        got = torch.cat(list(sent))[-ROWS:]
        off = _off(got.float(), expected["hidden"][last])
        if got.dtype is not torch.float32 or not off <= HIDDEN:
            rounded = torch.equal(got.bfloat16().to(got.dtype), got)
            what = "holds bfloat16 values, and the model is float32" if rounded else f"is off by {off:.2g}"
            alarms.append(Alarm(check="boundary", culprit=f"output of stage {mesh.pp_rank}", what=what, size=off))
    parts: list[Any] = [None] * mesh.pp
    dist.all_gather_object(parts, alarms, group=mesh.axis("pp").get_group())
    return [alarm for part in parts for alarm in part]


def tied(path: Path) -> list[Alarm]:
    """After loading, a head that the config ties to the embedding must be the same parameter."""
    model = load(path)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    if not model.config.tie_word_embeddings or head is embedding:
        return []
    return [
        Alarm(check="tie", culprit="lm_head.weight", what="is a copy of the embedding, not the embedding", size=1.0)
    ]


def meta_initialised(path: Path) -> list[Alarm]:
    """Build on the meta device, load the weights, and compare buffers and logits with a model built with values."""
    right = load(path)
    with torch.device("meta"):
        built = type(right)(right.config)
    built = built.to_empty(device="cpu").train()
    built.load_state_dict(right.state_dict())
    if right.config.tie_word_embeddings:
        built.tie_weights()
    alarms = []
    buffers = dict(built.named_buffers())
    for name, value in right.named_buffers():
        if not torch.equal(buffers[name], value):
            what = "is not in the checkpoint, and nothing computed it again after the meta device"
            alarms.append(Alarm(check="buffers", culprit=name, what=what, size=_off(buffers[name], value)))
    if not alarms:
        batch = batches(right.config.vocab_size)[0]
        given = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
        with torch.no_grad():
            off = _off(built(**given).logits, right(**given).logits)
        if not off <= HIDDEN:
            alarms.append(Alarm(check="buffers", culprit="logits", what=f"are off by {off:.2g}", size=off))
    return alarms


def adapted(path: Path) -> list[Alarm]:
    """What a model writes must be what its checkpoint holds, tensor by tensor, and what it reads what it wrote."""
    from safetensors import safe_open

    from pilotage.weights.adapter import StateDictAdapter

    model = load(path)
    served = model.architecture
    adapter = getattr(model, "state_dict_adapter", None) or StateDictAdapter(
        served.weight_map(served.config_class.from_configs(model.config))
    )
    written = adapter.to_hf(dict(model.state_dict()))
    alarms, stored = [], set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                stored.add(name)
                if name not in written:
                    alarms.append(Alarm(check="adapter", culprit=name, what="is not written", size=float("inf")))
                elif not torch.equal(written[name], opened.get_tensor(name)):
                    off = _off(written[name], opened.get_tensor(name))
                    alarms.append(Alarm(check="adapter", culprit=name, what="is written with other values", size=off))
    extra = sorted(written.keys() - stored)
    return [
        *alarms,
        *(Alarm(check="adapter", culprit=n, what="is no tensor of the checkpoint", size=1.0) for n in extra),
    ]


def resumed(path: Path) -> list[Alarm]:
    """Save, read into another model and optimizer, and compare weights, moments and the step after."""
    from pilotage.training import checkpoint
    from pilotage.training.engine import Batch, Engine, full
    from pilotage.training.mesh import Parallel, make_mesh

    parallel = Parallel(dp=RANKS)
    mesh = make_mesh(parallel)
    first, second = (Engine(load(path), mesh, parallel) for _ in range(2))
    optimizers = [_adamw(engine.parameters().values()) for engine in (first, second)]
    trained: Any = first.model
    given = batches(trained.config.vocab_size)
    parts = [[Batch(**{name: value.chunk(RANKS)[mesh.dp_rank] for name, value in batch.items()})] for batch in given]

    def step(which: int, at: int) -> None:
        engine, optimizer = (first, second)[which], optimizers[which]
        optimizer.zero_grad()
        engine.forward_backward(parts[at])
        optimizer.step()

    step(0, 0)
    where = [tempfile.mkdtemp(prefix="pilotage-resume-") if mesh.first else None]
    dist.broadcast_object_list(where, src=0)
    saved = Path(str(where[0])) / "step"
    checkpoint.save(saved, first, optimizers[0], {"step": 1}, write_others=lambda directory: None)
    checkpoint.load(saved, second, optimizers[1])
    alarms = []
    pairs = zip(first.parameters().items(), second.parameters().values(), strict=True)
    for (name, one), other in pairs:
        if not torch.equal(full(one.detach()), full(other.detach())):
            what = "has other values after resuming"
            alarms.append(Alarm(check="resume", culprit=name, what=what, size=1.0))
        for kind, value in optimizers[0].state[one].items():
            got = optimizers[1].state[other].get(kind)
            if got is None or not torch.equal(full(got), full(value)):
                what = f"the optimizer's {kind} of {name} did not come back"
                alarms.append(Alarm(check="resume", culprit=f"optimizer state: {kind}", what=what, size=2.0))
    if not alarms:
        for which in (0, 1):
            step(which, 1)
        for (name, one), other in zip(first.parameters().items(), second.parameters().values(), strict=True):
            if not torch.equal(full(one.detach()), full(other.detach())):
                alarms.append(Alarm(check="resume", culprit=name, what="moves otherwise after resuming", size=1.0))
    if mesh.first:
        import shutil

        shutil.rmtree(saved.parent, ignore_errors=True)
    return alarms


def examine(path: Path) -> list[Alarm]:
    """Run every check in this process, one of `RANKS` that run it together; the largest alarm of a check comes first.

    Args:
        path: checkpoint directory.
    """
    found: list[Alarm] = []
    for check in (tied, meta_initialised, adapted):
        found += check(path)
    if not found:
        # A model that is built wrongly trains wrongly everywhere, which says nothing about a mesh.
        model = load(path)
        expected = plain(model, batches(model.config.vocab_size))
        for mesh in MESHES:
            found += meshed(path, mesh, expected)
    if not found:
        found += resumed(path)
    return in_order(found)


def in_order(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Sort alarms so that the first names the cause.

    What a stage sends on comes before what follows from it. A loss that is wrong from the start is wrong before any
    gradient. Among gradients the most wrong one stands first.
    """
    kinds = ("tie", "buffers", "adapter", "boundary", "loss", "gradients", "norm", "weights", "resume")
    unique = {(alarm.check, alarm.culprit): alarm for alarm in sorted(alarms, key=lambda alarm: alarm.size)}
    return sorted(unique.values(), key=lambda alarm: (kinds.index(alarm.check), -alarm.size))


@contextmanager
def process_group(rank: int, store: str) -> Iterator[None]:
    """Form the group of `RANKS` processes on gloo around a file, and leave it together."""
    from pilotage.training import mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    yield
    mesh.finish()
