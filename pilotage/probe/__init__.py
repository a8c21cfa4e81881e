"""The instrument: recording and replacing tensors inside a running model."""

from pilotage.probe.captures import Captures, CaptureWriter
from pilotage.probe.replacement import ReplacementContext, TensorReplacer

__all__ = ["CaptureWriter", "Captures", "ReplacementContext", "TensorReplacer"]
