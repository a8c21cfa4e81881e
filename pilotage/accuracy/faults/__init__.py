"""Planted faults: the test of the product itself."""

from pilotage.accuracy.faults.fault import Fault, Patch
from pilotage.accuracy.faults.report import Report
from pilotage.accuracy.faults.run import measure
from pilotage.accuracy.faults.table import FAULTS

__all__ = ["FAULTS", "Fault", "Patch", "Report", "measure"]
