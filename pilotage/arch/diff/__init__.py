"""What differs between a model already supported and a new one, and the work that follows.

from pilotage.arch.diff import diff
print(diff("tiny:llama3", "path/to/config.json").to_json()["work_items"])
"""

from pilotage.arch.diff.compare import ArchDiff, diff
from pilotage.arch.diff.work import WorkItem

__all__ = ["ArchDiff", "WorkItem", "diff"]
