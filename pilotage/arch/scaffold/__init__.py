"""Write the package of a new model from a donor's: `pilotage new`.

The donor's source is copied under new names, and every work item of the diff becomes a call of `port()` in the function
that it touches, which fails by name until the place is written. Functions that the donor inherits are written out, so
that there is something to change.
"""

from pilotage.arch.scaffold.package import Scaffold, scaffold

__all__ = ["Scaffold", "scaffold"]
