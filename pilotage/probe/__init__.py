"""The instrument: recording and replacing tensors inside a running model."""

from pilotage.probe.captures import Captures, CaptureWriter
from pilotage.probe.discovery import SiteInfo, sites_of
from pilotage.probe.plan import Taps
from pilotage.probe.reference import TensorReplacementConfig, load_replacer, save_reference
from pilotage.probe.replacement import ReplacementContext, TensorReplacer

__all__ = [
    "CaptureWriter",
    "Captures",
    "ReplacementContext",
    "SiteInfo",
    "Taps",
    "TensorReplacementConfig",
    "TensorReplacer",
    "load_replacer",
    "save_reference",
    "sites_of",
]
