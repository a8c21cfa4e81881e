"""The same prompts under other conditions: alone and in company, cut, cached, preempted, compiled, on two ranks."""

from pilotage.accuracy.invariance.plans import RELATIONS
from pilotage.accuracy.invariance.result import Invariance
from pilotage.accuracy.invariance.run import ENGINES, invariance

__all__ = ["ENGINES", "RELATIONS", "Invariance", "invariance"]
