"""The same prompts under other conditions: alone and in company, cut, cached, preempted, compiled, on two ranks."""

from pilotage.accuracy.invariance.bench import ENGINES
from pilotage.accuracy.invariance.plans import RELATIONS
from pilotage.accuracy.invariance.result import Invariance
from pilotage.accuracy.invariance.run import invariance

__all__ = ["ENGINES", "RELATIONS", "Invariance", "invariance"]
