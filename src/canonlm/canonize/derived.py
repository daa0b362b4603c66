"""Classes made at run time: a mixin of ours, placed before the class of a host's model, block, MLP or cache."""

import functools
import types
from typing import Any


class Derived:
    """The base of these mixins. attributes: names of further attributes of the classes."""

    canon_attributes: tuple[str, ...] = ()

    def __reduce__(self) -> Any:  # pickle cannot find a class created at run time
        mixin, plain = type(self).__bases__
        return _new, (mixin, plain, {name: getattr(self, name) for name in self.canon_attributes}), vars(self)


@functools.cache
def derived(mixin: Any, plain: Any, **attributes: Any) -> Any:
    """The subclass of `plain` with the mixin before it. It has the name and module of `plain`: the library looks up
    classes by them, finds out what may not be split, and takes classes of other modules for remote code."""
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain.__name__, (mixin, plain), names | attributes)


def plain_class(made: type) -> Any:
    """The class that a derived one was made from."""
    return made.__bases__[1]


def change_class(module: Any, made: Any) -> None:
    """Make `module` one of the class `made`. Where accelerate has put its own forward before the module's, which it
    keeps as `_old_forward`, it then calls that of the new class."""
    module.__class__ = made
    if "_old_forward" in vars(module):
        module._old_forward = types.MethodType(made.forward, module)


def _new(mixin: Any, plain: Any, attributes: dict[str, Any]) -> Any:
    made = derived(mixin, plain, **attributes)
    return made.__new__(made)
