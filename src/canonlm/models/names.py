"""Architecture names. They are complete: two models with the same name and sizes have the same architecture.

    llama+canon              gla5-conv{num_heads=4}+canon=AC:nores       gdn2.gdn2.gdn2.llama+canon
    hf:qwen3{num_key_value_heads=2}        fla:kda        mine.py:MyMixer+canon        package.module:Model

A name is a base, or several that alternate over the layers, with settings of its mixer or of `CanonLMConfig` in braces,
and modifiers. Sizes (layers, width, heads, vocabulary, context) come from elsewhere. `resolve` returns the fields of a
name, `name_of` the name of a configuration: each is the inverse of the other.
"""

import copy
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from canonlm.canon import sites as canon_sites
from canonlm.canon.sites import SHORT_CONV, Variant
from canonlm.core.errors import expected, unknown
from canonlm.models.config import OF_CANON, CanonLMConfig
from canonlm.models.fields import FIELDS, GROUPS, lacks, mixer_reads, reads
from canonlm.models.mixers.base import MIXERS, Architecture, Mixer


class Base(NamedTuple):
    """A base of a name. `short_conv`: with the short convolution (site b); `settings`: those in its braces."""

    name: str
    mixer: type[Mixer]
    architecture: Architecture
    short_conv: bool
    settings: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The settings that are options of the mixer."""
        return {key: self.settings[key] for key in self.settings if key in self.mixer.Options.__dataclass_fields__}

    def canon(self, modifiers: Mapping[str, str | None], mlp: str, default: Variant) -> str:
        """Its Canon sites: those of `+canon`, if it is one of the modifiers, and b with a short convolution."""
        sites = {SHORT_CONV: Variant()} if self.short_conv else {}
        if "canon" in modifiers:
            of_modifier = canon_sites.of_modifier
            sites |= of_modifier(modifiers["canon"], recurrent=self.mixer.recurrent, mlp=mlp, default=default)
        return canon_sites.write(sites, default=default)


@dataclass(frozen=True)
class Modifier:
    """`+name` or `+name=value`. `read(value, head_dim, num_heads)` returns the fields that it sets, `write(config)` the
    value for a configuration: None for a bare modifier, False if the name needs no modifier. `of_attention`: the name
    needs a layer that attends."""

    about: str
    read: Callable[[str | None, int, int], dict[str, Any]]
    write: Callable[[CanonLMConfig], str | Literal[False] | None]
    of_attention: bool = False


def bases() -> dict[str, tuple[type[Mixer], Architecture]]:
    """Every base name, of all registered mixers."""
    return {name: (mixer, about) for mixer in MIXERS.values() for name, about in mixer.architectures.items()}


def split_names(text: str) -> list[str]:
    """The names in a list such as `llama,hf:qwen3{num_key_value_heads=2,head_dim=16},llama+canon=A:zero,D:k3`.

    Commas in braces separate settings, and a group of Canon sites belongs to the `+canon=` before it.
    """
    names: list[str] = []
    group = re.compile(rf"[{''.join(canon_sites.letters())}]+(:\w+)*(\+|$)")
    for part in re.split(r",(?![^{}]*\})", text):
        if names and "+canon=" in names[-1] and group.match(part.strip()):
            names[-1] += f",{part.strip()}"
        else:
            names.append(part.strip())
    if bare := [name for name in names if "=" in re.split(r"[{+]", name, maxsplit=1)[0]]:  # the shell expanded braces
        raise expected("arch", "quotes around names with braces: 'llama{num_key_value_heads=2,head_dim=16}'", bare[0])
    return names


# -- the other modifiers ----------------------------------------------------------------------------------------------


def _rope(value: str | None, head_dim: int, num_heads: int) -> dict[str, Any]:
    what = f"a share from 0 to 1 of each head, an even number of its {head_dim} channels, such as +rope=0.25"
    heads, times, share = (value or "").rpartition("x")
    channels = _share(share, head_dim)
    if channels is None or channels % 2:
        raise expected("+rope", what, value)
    if not times:
        return {"rope_dim": channels}
    rotated = _share(heads, num_heads)
    if not rotated:
        raise expected("+rope", f"a share of the {num_heads} heads before the x, such as +rope=0.5x0.5", value)
    return {"rope_dim": channels, "rope_heads": rotated}


def _share(text: str, total: int) -> int | None:
    """That share of `total`, or None if the text is not a number from 0 to 1 or the result is not an integer."""
    try:
        part = total * float(text)
        return round(part) if 0 <= part <= total and math.isclose(part, round(part), abs_tol=1e-6) else None
    except (ValueError, OverflowError):
        return None


def _written_rope(config: CanonLMConfig) -> str | Literal[False]:
    if config.rope_dim == 0 and config.alibi is not None:
        return False  # ALiBi takes the place of rotations
    share, heads = config.rope_dim / config.head_dim, config.rope_heads / config.num_attention_heads
    if (share, heads) == (1, 1):
        return "1" if config.alibi is not None else False
    return f"{share:.9g}" if heads == 1 else f"{heads:.9g}x{share:.9g}"


def _window(value: str | None, head_dim: int, num_heads: int) -> dict[str, Any]:
    if value is None or not value.isascii() or not value.isdecimal() or int(value) < 2:
        raise expected("+window", "a number of tokens >= 2, such as +window=512", value)
    return {"sliding_window": int(value)}


def _named(name: str, about: str, key: str, meanings: dict[str | None, Any]) -> Modifier:
    """A modifier that sets one field. meanings: the field's value by the modifier's."""

    def read(value: str | None, head_dim: int, num_heads: int) -> dict[str, Any]:
        if value not in meanings:
            what = " or ".join("no value" if choice is None else f"+{name}={choice}" for choice in meanings)
            raise expected(f"+{name}", what, value)
        return {key: meanings[value]}

    def write(config: CanonLMConfig) -> str | Literal[False] | None:
        return next((spelling for spelling, value in meanings.items() if getattr(config, key) == value), False)

    return Modifier(about, read, write, of_attention=key in GROUPS["attention"])


MODIFIERS = {
    "canon": Modifier(
        "Canon layers at A, B, C and D of a block; other sites and variants: +canon=KVOM:scaled, +canon=A:zero,D:k3",
        lambda *_: {},
        lambda _: False,
    ),
    "frozen": _named(
        "frozen", "the same as +canon=…:frozen: Canon weights keep their initial values", "canon_frozen", {None: True}
    ),
    "rope": Modifier(
        "rotary positions on a share of each head, +rope=0.25; in half the heads, +rope=0.5x0.5",
        _rope,
        _written_rope,
        of_attention=True,
    ),
    "alibi": _named(
        "alibi",
        "attention decreases with distance; +alibi=hard: half of the heads see nearby tokens only",
        "alibi",
        {None: "alibi", "hard": "hard"},
    ),
    "qknorm": _named("qknorm", "RMSNorm on queries and keys", "qk_norm", {None: True}),
    "gate": _named(
        "gate",
        "attention's output times a sigmoid gate of its input (arXiv 2505.06708)",
        "attention_gate",
        {None: True},
    ),
    "sink": _named(
        "sink",
        "a learned logit in each head that takes attention from the tokens (arXiv 2508.10925)",
        "attention_sink",
        {None: True},
    ),
    "window": Modifier(
        "attention to the nearest tokens only, +window=512, the current one included (arXiv 2004.05150)",
        _window,
        lambda config: False if config.sliding_window is None or config.sliding_layers else str(config.sliding_window),
        of_attention=True,
    ),
    "attnres": _named(
        "attnres",
        "each mixer and MLP reads a softmax mean of all outputs before it, not their sum (arXiv 2603.15031)",
        "attention_residuals",
        {None: True},
    ),
    "mlp": _named(
        "mlp",
        "another MLP: +mlp=standard (no gate), +mlp=moe (32 experts), +mlp=none",
        "mlp",
        {"standard": "standard", "moe": "moe", "none": "none"},
    ),
    "relu2": _named("relu2", "squared ReLU in the MLP, in place of SiLU", "hidden_act", {None: "relu2"}),
}


# -- from a name to fields --------------------------------------------------------------------------------------------


def resolve(
    arch: str, *, hidden_size: int, num_heads: int, head_dim: int | None = None, canon: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The configuration fields that a name stands for: `resolve("llama+canon=AC", hidden_size=512, num_heads=8)`.

    head_dim: of attention, if another than the name's. canon: fields that all Canon layers share (`OF_CANON`), if
    others than the name sets them.
    `gdn2.gdn2.gdn2.llama` is a hybrid whose layers alternate, as is `llama{sliding_window=512}.llama`. ValueError names
    an unknown or repeated base, modifier or setting, or an invalid value; `check_read` refuses settings without effect.
    """
    layers, modifiers = _split(arch)
    fields: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    kinds: dict[str, Base] = {}
    for base in layers:
        first = kinds.setdefault(base.mixer.name, base)
        if first.architecture != base.architecture or first.options != base.options:
            raise expected("arch", f"one kind of {base.mixer.name} in all layers", arch)
        for key, value in {**base.architecture.settings(hidden_size), **base.settings}.items():
            if key in base.mixer.Options.__dataclass_fields__:
                options.setdefault(base.mixer.name, {})[key] = value
            else:
                fields[key] = value
    if options:
        fields["mixer_options"] = options
    width = head_dim or fields.get("head_dim")
    width = width if type(width) is int and width > 0 else hidden_size // num_heads  # the configuration refuses others
    added: dict[str, str | None] = {}
    for part in modifiers:
        modifier, equals, value = part.partition("=")
        if not equals and modifier.startswith("canon:"):
            modifier, _, value = modifier.partition(":")  # +canon:k3 has no sites
            value = f":{value}"
        if modifier not in MODIFIERS:
            raise unknown("architecture modifier", f"+{modifier}", [f"+{known}" for known in MODIFIERS])
        if modifier in added:
            raise expected("arch", f"+{modifier} at most once", arch)
        added[modifier] = value if equals or value else None
        if MODIFIERS[modifier].of_attention and not any(base.mixer.attends for base in layers):
            raise expected("arch", f"an attention layer for +{modifier}, as in llama or {layers[0].name}.llama", arch)
        fields |= MODIFIERS[modifier].read(added[modifier], width, num_heads)
    windows = [base.settings.get("sliding_window") for base in layers if base.mixer.attends]
    if len({*windows} - {None}) > 1 or (any(windows) and "window" in added):
        raise expected("arch", "one window, as in llama{sliding_window=512}.llama", arch)
    if None in windows and any(windows):
        fields["sliding_layers"] = [base.settings.get("sliding_window") is not None for base in layers]
    mixers = [base.mixer.name for base in layers]
    if mixers != ["attention"]:
        fields["mixers"] = mixers
    if not {"canon_set", "canon_sets"} & fields.keys():
        # What all sites share is the default of a group: +canon=A:k4 is A:k4 beside {canon_kernel=3}, too.
        common = fields | dict(canon or {})
        default = Variant(**{name: common[field] for field, name in OF_CANON.items() if field in common})
        sites = [base.canon(added, fields.get("mlp", "gated"), default) for base in layers]
        if len(set(sites)) > 1:
            fields["canon_sets"] = sites
        elif sites[0]:
            fields["canon_set"] = sites[0]
    elif "canon" in added:
        raise expected("arch", "either +canon or canon_set in braces", arch)
    return fields


def _split(arch: str) -> tuple[list[Base], list[str]]:
    """The bases and the modifiers of a name."""
    known = bases()
    pattern = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    token = re.compile(rf"({pattern})(-conv)?(?:\{{([^{{}}]*)\}})?(?=[.+]|$)")
    layers, rest = [], arch
    while True:
        if (match := token.match(rest)) is None or (match[2] and not known[match[1]][1].short_conv):
            unknown_name = re.split(r"[.+{]", rest, maxsplit=1)[0]
            if re.match(r"[^+{:]*\.py(?![\w:])", rest):
                raise expected("arch", "FILE.py:NAME, a mixer or a model in that file", arch)
            if "/" in rest or rest.startswith("."):
                what = "the name of an architecture. `canonlm train RECIPE model.weights=FOLDER` trains a saved model "
                raise expected("arch", f"{what}further, and `canonlm eval FOLDER` evaluates it", arch)
            without = [f"{name}-conv" for name, (_, about) in known.items() if about.short_conv]
            if unknown_name in (*known, *without):
                raise expected("arch", f"+, . or one pair of braces after {unknown_name}, and -conv before them", arch)
            meant = [f"hf:{unknown_name}"] if unknown_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else []
            raise unknown("architecture", unknown_name, [*known, *without], meant=meant)
        mixer, about = known[match[1]]
        settings = _checked(match[1], mixer, read_settings(match[3] or ""))
        layers.append(Base(match[1], mixer, about, about.short_conv and not match[2], settings))
        rest = rest[match.end() :]
        if not rest.startswith("."):
            return layers, rest.split("+")[1:]
        rest = rest[1:]


def _checked(name: str, mixer: type[Mixer], settings: dict[str, Any]) -> dict[str, Any]:
    own = set(mixer.Options.__dataclass_fields__)
    choices = {*own, *FIELDS} - {"mixers", "mixer_options"}
    for key in settings:
        if key not in choices:
            raise unknown(f"setting of {name}", key, choices, f"settings of {name}")
    return settings


# -- settings without effect ------------------------------------------------------------------------------------------


def check_read(config: CanonLMConfig, arch: str, fields: Mapping[str, Any]) -> None:
    """InvalidSetting for a setting in the name `arch`, or one of `fields` (`model.fields`), without effect. Saved
    configurations may hold such settings, so `CanonLMConfig` takes them."""
    layers, modifiers = _split(arch)
    typed = [(key, base.settings[key], base) for base in layers for key in base.settings.keys() - base.options.keys()]
    for modifier, _, value in (part.partition("=") for part in modifiers):
        if not modifier.startswith("canon"):
            read = MODIFIERS[modifier].read(value or None, config.head_dim, config.num_attention_heads)
            typed += [(key, each, layers[0]) for key, each in read.items()]
    for key, value, base in sorted(typed, key=lambda one: one[0]):
        if (part := lacks(config, key, base.name)) is not None:
            raise expected("arch", part, arch)
        if key == "sliding_window":  # `resolve` checks it; other fields have one value in all layers
            continue
        if any(other == key and each != value for other, each, _ in typed):
            raise expected("arch", f"one value of {key}", arch)
        alike = [other.settings for other in layers if other.mixer is base.mixer]
        if key in GROUPS["attention"] and key in base.settings and not all(key in each for each in alike):
            raise expected("arch", f"{key} in all layers of {base.name}: it cannot differ between them", arch)
    for mixer in (fields.get("mixer_options") or {}).keys() - {*config.mixers}:
        raise expected(f"model.fields.mixer_options.{mixer}", f"a layer of {mixer} to read it", arch)
    for key, value in fields.items():
        if value is not None and (part := lacks(config, key, layers[0].name)) is not None:
            raise expected(f"model.fields.{key}", part, value)


# -- settings in braces -----------------------------------------------------------------------------------------------


def read_settings(text: str) -> dict[str, Any]:
    """`a=1,b=[x,y],c=null` → values as in JSON; anything else is a string, or in brackets a list of strings."""
    settings: dict[str, Any] = {}
    for pair in re.split(r",(?![^\[\]]*\])", text) if text.strip() else []:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise expected("arch", "fields such as {num_heads=4,num_key_value_heads=2}", pair)
        if key in settings:
            raise expected("arch", f"{key} at most once", text)
        settings[key] = _read_value(value)
    return settings


def _read_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        inside = text[1:-1] if text.startswith("[") and text.endswith("]") else None
        return text if inside is None else [_read_value(part) for part in inside.split(",")]


def written_settings(settings: Mapping[str, Any]) -> str:
    """The inverse of `read_settings`, in braces; "" without any."""
    pairs = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in sorted(settings.items())]
    return "{" + ",".join(pairs).replace('"', "") + "}" if pairs else ""


# -- from a configuration to its name ---------------------------------------------------------------------------------


def name_of(config: CanonLMConfig, *, trained: bool = False) -> str:
    """The complete name of a configuration, from which `resolve` restores all fields but the sizes: the one that it
    keeps, or if it does not describe it, the shortest. With `trained`, fields that only set initial weights and the
    training loss are left out."""
    mixers = list(dict.fromkeys(config.mixers))
    if trained:
        fresh = CanonLMConfig(mixers=mixers, num_hidden_layers=len(mixers), mlp=config.mlp)
        config = copy.copy(config)
        for key in GROUPS["training"]:
            setattr(config, key, getattr(fresh, key))
    if config.arch is not None and _is_named(config, config.arch):
        return config.arch
    choices = itertools.product(*(MIXERS[mixer].architectures for mixer in mixers))
    names = [_complete(config, dict(zip(mixers, chosen, strict=True))) for chosen in choices]
    if not any(names):
        raise ValueError("no architecture name describes this configuration")
    return min(filter(None, names), key=len)


def _canon_of(config: CanonLMConfig) -> str:
    """The modifier `+canon` that stands for the sites of all layers; "" if there is none."""
    layers = [{x: v for x, v in canon_sites.parse(text).items() if x != SHORT_CONV} for text in config.canon_texts]
    texts = list(dict.fromkeys(filter(None, map(canon_sites.write, layers))))
    endings = [text[text.index(":") :] if ":" in text else None for text in texts if "," not in text]
    recurrent = [MIXERS[mixer].recurrent for mixer in config.mixers]
    for value in [*endings, *texts]:
        try:
            named = [canon_sites.of_modifier(value, recurrent=each, mlp=config.mlp) for each in recurrent]
        except ValueError:  # a variant that some of the usual sites do not take
            continue
        if named == layers:
            return "+canon" + ("" if value is None else value if value.startswith(":") else f"={value}")
    return ""


def _complete(config: CanonLMConfig, names: Mapping[str, str]) -> str | None:
    """The name with these bases, by mixer; fields that no modifier sets are in braces. None if there is none."""
    known = bases()
    added = any(
        SHORT_CONV in config.sites(i) and not known[names[x]][1].short_conv for i, x in enumerate(config.mixers)
    )
    canon = "" if added else _canon_of(config)  # no modifier adds a short convolution: canon_set in braces does
    layers = [
        (
            names[mixer],
            mixer,
            known[names[mixer]][1].short_conv and SHORT_CONV not in config.sites(i),
            {"sliding_window": config.window(i)} if config.sliding_layers and config.window(i) else {},
        )
        for i, mixer in enumerate(config.mixers)
    ]
    pattern = _pattern(layers)

    def written(settings: Mapping[tuple[str, str], Any], modifiers: str) -> str:
        parts = [
            f"{name}{'-conv' * bare}"
            + written_settings({key: x for (of, key), x in settings.items() if of == mixer} | own)
            for name, mixer, bare, own in pattern
        ]
        return ".".join(parts) + modifiers

    def differs(key: str, other: CanonLMConfig) -> bool:
        return reads(config, key) and meaning_of(config, key) != meaning_of(other, key)

    def of_braces(key: str) -> tuple[str, str]:
        """A setting of a mixer that has no option of that name, and if there is one that reads the field."""
        able = [mixer for _, mixer, *_ in pattern if key not in MIXERS[mixer].Options.__dataclass_fields__]
        return ([mixer for mixer in able if mixer_reads(MIXERS[mixer], key)] or able)[0], key

    wide = reads(config, "head_dim") and config.head_dim * config.num_attention_heads != config.hidden_size
    given = {of_braces("head_dim"): config.head_dim} if wide else {}  # `+rope` is a share of it
    try:
        modifiers, plain = canon, _of_name(config, written(given, canon))
        for name, modifier in MODIFIERS.items():
            value = False if name == "frozen" else modifier.write(config)
            if value is not False:
                fields = modifier.read(value, config.head_dim, config.num_attention_heads)
                if any(differs(key, plain) for key in fields):
                    modifiers += f"+{name}" + ("" if value is None else f"={value}")
        near = _of_name(config, written(given, modifiers))
        settings = given | {
            (mixer, key): value
            for mixer in names
            for key, value in config.mixer_options.get(mixer, {}).items()
            if value != near.mixer_options.get(mixer, {}).get(key)
        }
        for key in FIELDS:
            if key not in ("mixers", "mixer_options") and differs(key, near):
                settings[of_braces(key)] = _pattern(meaning_of(config, key))
        for setting in list(settings):
            fewer = {other: value for other, value in settings.items() if other != setting}
            if _is_named(config, written(fewer, modifiers)):  # it follows from another setting
                settings = fewer
        name = written(settings, modifiers)
        return name if _is_named(config, name) else None
    except ValueError:
        return None


def _is_named(config: CanonLMConfig, name: str) -> bool:
    """Whether the name stands for this configuration."""
    try:
        named = _of_name(config, name)
    except ValueError:  # settings that do not fit together
        return False
    return all(meaning_of(config, key) == meaning_of(named, key) for key in FIELDS)


def meaning_of(config: CanonLMConfig, key: str) -> Any:
    """The value of a field; Canon sites are compared layer by layer, in `canon_sets`."""
    if key == "canon_set" or not reads(config, key):
        return None
    # In a list in braces, commas separate layers, and semicolons groups of sites.
    return [text.replace(",", ";") for text in config.canon_texts] if key == "canon_sets" else getattr(config, key)


def _pattern(value: Any) -> Any:
    """The repeating part of a list with an entry per layer."""
    if not isinstance(value, list):
        return value
    return next(value[:n] for n in range(1, len(value) + 1) if value == value[:n] * (len(value) // n))


def _of_name(config: CanonLMConfig, name: str) -> CanonLMConfig:
    """The configuration of that name at the sizes of `config`."""
    fields = resolve(name, hidden_size=config.hidden_size, num_heads=config.num_attention_heads)
    named = CanonLMConfig(**{**{key: getattr(config, key) for key in GROUPS["sizes"] | GROUPS["unnamed"]}, **fields})
    check_read(named, name, {})
    return named
