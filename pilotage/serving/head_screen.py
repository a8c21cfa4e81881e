"""Which heads get an 8-bit copy, on which greedy steps find what they need not compute."""

from __future__ import annotations

import logging
import time

import torch

import pilotage.functional as NF
from pilotage.core.errors import Unsupported
from pilotage.nn import LMHead

_LOG = logging.getLogger("vllm.pilotage")
FEWEST_TOKENS = 32768  # below, a head takes too little of a step


def refusal(model: torch.nn.Module) -> str | None:
    """Say why the head of this model cannot be screened; None if it can."""
    head = getattr(model, "lm_head", None)
    if not isinstance(head, LMHead):
        return "its head is not one of pilotage's"
    if head.num_shards > 1 or head.component.dp.process_group is not None:
        return "its head is divided over ranks"
    if head.weight.dtype is not torch.bfloat16:
        return f"its head is in {str(head.weight.dtype).removeprefix('torch.')}, not bfloat16"
    if head.weight.device.type != "cpu":
        return "its head is not in host memory"
    if head.bias is not None:
        return "its head has a bias"
    if getattr(getattr(model, "config", None), "logit_softcap", None) is not None:
        return "its logits are capped, and capped logits tie where others do not"
    if not NF.Screen.fits(head.weight.shape[1]):
        return f"its width {head.weight.shape[1]} is no multiple of 4 from 64 on"
    state = NF.load_kernels()["cpu"]
    return None if state == "loaded" else state


def attach(model: torch.nn.Module, wanted: bool | None) -> bool:
    """Give the head of a loaded model its copy where that is wanted.

    Args:
        model: with its weights.
        wanted: as `TargetConfig.screen_lm_head`.

    Returns:
        Whether it has one now.

    Raises:
        Unsupported: it is wanted and cannot be done.
    """
    why = refusal(model)
    if wanted and why is not None:
        raise Unsupported(f"the LM head cannot be screened: {why}", where="screen_lm_head", do="remove it")
    if why is not None or not (wanted or (wanted is None and model.lm_head.weight.shape[0] >= FEWEST_TOKENS)):
        return False
    start = time.perf_counter()
    screen = model.lm_head.screen = NF.Screen(model.lm_head.weight)
    size = sum(tensor.numel() * tensor.element_size() for tensor in screen.tensors())
    _LOG.info("8-bit copy of the LM head: %.0f MiB, made in %.1f s", size / 2**20, time.perf_counter() - start)
    return True
