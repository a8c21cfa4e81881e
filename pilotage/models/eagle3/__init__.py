"""EAGLE3: a draft head that continues a served model from its hidden states."""

from pilotage.models.eagle3.config import Eagle3Config
from pilotage.models.eagle3.model import Eagle3DraftHead

__all__ = ["Eagle3Config", "Eagle3DraftHead"]
