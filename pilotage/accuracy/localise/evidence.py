"""What is known of a target besides its measured sites: weights, constants, answers to inputs that no prompt gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from pilotage.accuracy import metrics

# Norms are asked about rows this many times larger than the square root of their epsilon: under ordinary activations
# no number shows a wrong epsilon.
SMALL = 3.0
# Positions at which rotary tables are compared besides the first ones.
FAR = (63, 255, 1000, 5000, 20000, 100000)
# Over rounding: a table's angle at position p is uncertain by p eps / 2 whoever computes it, and then goes through sin.
ROPE_SLACK = 4.0
NORM_SLACK = 8.0


def differing_parameters(target: nn.Module, reference: Any) -> list[str]:
    """Name the target's parameters whose values are not the reference's; others' names and shapes are not compared.

    Args:
        target: our model.
        reference: Hugging Face's, its weights rounded to the target's dtype.
    """
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    found = []
    for name, parameter in target.named_parameters(remove_duplicate=False):
        other = theirs.get(name)
        # Experts are stored in as many layouts as there are kernels for them; their outputs are measured.
        if other is None or other.shape != parameter.shape or ".experts." in name:
            continue
        if not torch.equal(parameter.detach(), other.detach().to(parameter.dtype)):
            found.append(name)
    return found


@torch.inference_mode()
def norms(target: nn.Module, reference: Any) -> dict[str, str]:
    """Ask every norm about small rows; returns what differs, by module.

    Args:
        target: our model in fp32.
        reference: Hugging Face's in fp32.
    """
    theirs = dict(reference.named_modules())
    found = {}
    generator = torch.Generator().manual_seed(0)
    for name, module in target.named_modules():
        other = theirs.get(name)
        eps = getattr(other, "variance_epsilon", getattr(other, "eps", None))
        if other is None or not eps or not isinstance(getattr(module, "weight", None), Tensor):
            continue
        x = torch.randn(16, module.weight.shape[-1], generator=generator) * (SMALL * float(eps) ** 0.5)
        error = metrics.relative_l2(module(x), other(x))
        if not error <= NORM_SLACK * metrics.RMS_FLOOR:
            own = getattr(module, "eps", None)
            says = f"; eps is {own:g}, the reference's {eps:g}" if own is not None and own != eps else ""
            found[name] = (
                f"it answers small inputs (RMS {SMALL:g} sqrt(eps)) with a relative error of {error:.2g}{says}"
            )
    return found


@torch.inference_mode()
def rotary(target: Any, reference: Any) -> str | None:
    """Compare the rotary tables up to the longest position; returns what differs.

    Args:
        target: our model.
        reference: Hugging Face's, fp32.
    """
    import pilotage.functional as NF

    module = getattr(reference.get_decoder(), "rotary_emb", None)
    backbone: Any = getattr(target, "model", None)
    if module is None or not hasattr(backbone, "rope"):
        return None
    longest = int(reference.config.get_text_config().max_position_embeddings)
    positions = torch.tensor(sorted({*range(16), *(p for p in FAR if p < longest), longest - 1}))
    by_type = "layer_type" in inspect.signature(module.forward).parameters
    x = torch.zeros(1, dtype=torch.float32)
    for kind, frequencies in backbone.rope.items():
        expected = module(x, positions[None], kind) if by_type else module(x, positions[None])
        tables = NF.rope_table(positions, frequencies, torch.float32)
        for ours, theirs in zip(tables, expected, strict=True):
            theirs = theirs[0]
            if ours.shape[-1] * 2 == theirs.shape[-1]:
                theirs = theirs[..., : ours.shape[-1]]
            elif theirs.shape[-1] * 2 == ours.shape[-1]:
                ours = ours[..., : theirs.shape[-1]]
            if ours.shape != theirs.shape:
                return f"{kind}: {ours.shape[-1]} channels are rotated, the reference's {theirs.shape[-1]}"
            allowed = ROPE_SLACK * metrics.FLOAT32_EPS * (1 + positions.double())[:, None]
            over = ((ours.double() - theirs.double()).abs() > allowed).any(-1)
            if bool(over.any()):
                return f"{kind}: cos and sin differ from position {int(positions[over][0])} on"
    return None
