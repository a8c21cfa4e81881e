"""Every module of the models that no other test checks module by module, through the plugin that packages use."""

from __future__ import annotations

import pytest

from pilotage.accuracy.pytest_plugin import ModuleCase


@pytest.mark.slow
def test_module(pilotage_module: ModuleCase) -> None:
    assert pilotage_module.entries()
    pilotage_module.assert_close()
