"""The name of the module at fault."""

from pilotage.accuracy.localise.blame import Culprit
from pilotage.accuracy.localise.run import ARMS, Condition, Localisation, localise

__all__ = ["ARMS", "Condition", "Culprit", "Localisation", "localise"]
