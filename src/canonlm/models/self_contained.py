"""A saved model with its code: flat modules beside its weights, made from our own sources.

The code is what `canonlm.core.bundle` makes of our decoder, without what a folder does not need.
"""

import ast
from os import PathLike

from canonlm.canon.sites import check_saved_with_code
from canonlm.core import bundle
from canonlm.core.bundle import bound_names, flat
from canonlm.core.errors import expected
from canonlm.core.user_code import is_reference
from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers import MIXERS

ENTRIES = {
    "AutoConfig": "canonlm.models.config.CanonLMConfig",
    "AutoModel": "canonlm.models.modeling.CanonLMModel",
    "AutoModelForCausalLM": "canonlm.models.modeling.CanonLMForCausalLM",
}
"""Attributes that transformers' Auto classes need."""


def write_code(config: CanonLMConfig, folder: str | PathLike) -> dict[str, str]:
    """Write the modules that a model of `config` needs into `folder`. Returns the `auto_map` of its config.json.
    InvalidSetting for a user's own mixer or site."""
    for mixer in config.mixers:
        if is_reference(mixer) or not MIXERS[mixer].__module__.startswith("canonlm."):
            raise expected("self_contained", f"False with {mixer}: only our own mixers are saved with code", True)
    check_saved_with_code(letter for i in range(config.num_hidden_layers) for letter in config.canons(i))
    bundle.write_modules(flat_modules(config), folder)
    return {auto: flat(path) for auto, path in ENTRIES.items()}


def flat_modules(config: CanonLMConfig) -> dict[str, str]:
    """The source code of these modules by flat name: "modeling", "config", "attention", …"""
    return bundle.flat_modules(ENTRIES.values(), lambda home: _source(home, config))


def _source(home: str, config: CanonLMConfig) -> str:
    """The source of one of our modules, without what a folder does not need: the search for mixers, and the code that
    makes such a folder."""
    if home == "canonlm.models.mixers":
        # transformers also makes a default configuration, with attention, to save only the differences.
        classes = {name: MIXERS[name] for name in dict.fromkeys(["attention", *config.mixers])}
        imports = "".join(f"from {mixer.__module__} import {mixer.__name__}\n" for mixer in classes.values())
        entries = ", ".join(f'"{name}": {mixer.__name__}' for name, mixer in classes.items())
        return f'"""The token mixers of this model."""\n\n{imports}\nMIXERS = {{{entries}}}\n'
    source = bundle.source_of(home)
    if home == "canonlm.models.modeling":
        source = _replaced(source, "from_pretrained", "    # from_pretrained is transformers' own.")
        return _replaced(
            source, "save_pretrained", "    # save_pretrained is transformers' own, which copies this code."
        )
    return source


def _replaced(source: str, name: str, text: str) -> str:
    """`source` with the statement that binds `name`, at the top or in a class, replaced."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign | ast.FunctionDef)]
    [node] = [node for node in nodes if bound_names(node) == [name]]
    lines = source.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "".join([*lines[: first - 1], f"{text}\n", *lines[node.end_lineno :]])
