"""Attention sites of models that exist: find them, name them, see what they compute."""

import sys
from types import ModuleType
from typing import Any


class _Former(ModuleType):
    """Until 0.4: where pickles of models that were tempered with 0.2 look for what is in ``actions``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        from attemper.sites import actions

        return getattr(actions, name)


for _name in ("attemper.sites.act", "attemper.sites.wrap"):
    sys.modules[_name] = _Former(_name)
