"""The documented import path of the target's configuration."""

from pilotage.core.config import NeuronConfig
from pilotage.probe.reference import TensorReplacementConfig

__all__ = ["NeuronConfig", "TensorReplacementConfig"]
