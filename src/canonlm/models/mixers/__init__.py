"""Token mixers: one file, one mixer, which registers itself. Every file in this folder is imported here."""

import importlib
import pkgutil

from canonlm.models.mixers.base import MIXERS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["MIXERS"]
