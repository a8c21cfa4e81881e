"""The documented import path of the target's configuration."""

from pilotage.core.config import NeuronConfig

__all__ = ["NeuronConfig"]
