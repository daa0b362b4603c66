"""The format of experiments: a checked YAML file of `figures/` (or of the user), with the settings that it names.

Everything is fixed before the first run: architectures by their complete names, tasks, sizes, rates, seeds, comparisons
and the smallest difference that matters. The sha256 of the file and of its settings is written beside every run, so
a changed file is another experiment.
"""

import itertools
import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from canonlm.core.errors import InvalidSetting, brief, expected, refused, unknown
from canonlm.core.safe_yaml import read_yaml
from canonlm.core.untrusted import read_text
from canonlm.core.user_code import reference_of
from canonlm.launch.recipes import TEXT
from canonlm.train.config import Settings
from canonlm.train.load_config import is_yours

HERE = Path(__file__).parent
FIGURES, SETTINGS = HERE / "figures", HERE / "settings.yaml"
SCALES = ("micro", "small", "paper")
MAX_SEED_SET = 10**6
SEEDS_OF_A_SET = 1000
FIRST_TUNING_SEED = 100
"""Within a seed set, fresh seeds begin at a setting's `first_seed` and tuning seeds at 100: no run of one kind sees
data or questions of the other."""
Scale = Literal["micro", "small", "paper"]
M = TypeVar("M", bound=Settings)
_SIZE = re.compile(r"([1-9]\d*)L([1-9]\d*)D(?:([1-9]\d*)H)?")


class Setting(Settings):
    """A task as it is trained and judged at one scale: an entry of `settings.yaml`."""

    task: str
    preset: str
    difficulties: list[str] = []  # of the preset; empty: its only one
    changes: dict[str, Any] = {}  # to the preset's configuration of a run
    variants: dict[str, dict[str, Any]] = {}  # more changes, by name: trainings that a claim compares, as `llama@NAME`
    rates: list[PositiveFloat] = []  # learning rates to choose from; empty: the preset's
    tuning_seeds: PositiveInt = 1  # by which the rate is chosen
    choose_on: Literal["validation", "test"] = "validation"  # test: as the paper did, on the runs that are reported
    looks: dict[Annotated[int, Field(ge=2)], Annotated[float, Field(gt=0, le=0.05)]] = {}
    # fresh seeds at which a verdict may be given, and the error that each look may make: {5: 0.02, 10: 0.03}
    first_seed: NonNegativeInt = 0  # of the fresh seeds: later ones where earlier ones have been looked at
    widen: NonNegativeInt = 0  # the max number of rates to add beyond an edge, while the best rate is there
    slices: list[str] = []  # whose mean is the score; empty: all of the task's primary scale
    measure: str | None = None  # a measure of the evaluation in place of accuracies. Of text: loss
    paper: str | None = None  # what the paper's grids call it

    @model_validator(mode="after")
    def _consistent(self) -> "Setting":
        if (self.choose_on == "validation") != bool(self.looks):
            raise expected("looks", "numbers of fresh seeds if choose_on is validation, else none", self.looks)
        if sum(self.looks.values()) > 0.05 + 1e-9:
            raise expected("looks", "levels that add up to at most 0.05", self.looks)
        last = self.first_seed + max(self.looks, default=self.tuning_seeds)
        for key, end in (("first_seed", last), ("tuning_seeds", FIRST_TUNING_SEED + self.tuning_seeds)):
            if end > SEEDS_OF_A_SET:
                raise expected(key, f"seeds below {SEEDS_OF_A_SET}, where the next seed set begins", getattr(self, key))
        if self.looks and self.first_seed < FIRST_TUNING_SEED + self.tuning_seeds and last > FIRST_TUNING_SEED:
            raise expected(
                "first_seed", f"fresh seeds apart from the tuning seeds, from {FIRST_TUNING_SEED}", self.first_seed
            )
        if self.task == TEXT and self.measure is None:
            raise expected("measure", "loss, for text", self.measure)
        if self.variants and self.difficulties:
            raise expected("variants", "no variants if there are difficulties", list(self.variants))
        return self

    @field_validator("changes")
    @classmethod
    def _leaves_the_grid_alone(cls, changes: dict[str, Any]) -> dict[str, Any]:
        train = changes.get("train", {})
        set_by_grid = [key for key in ("seed", "eval_seed", "eval_split") if key in train] + ["lr"] * (
            "lr" in train.get("optim", {})
        )
        if set_by_grid:
            raise expected("changes", "no seed, split or rate: the grid sets them", set_by_grid[0])
        return changes

    @property
    def until(self) -> float | None:
        """The share of right answers at which its runs end, if there is one."""
        share: float | None = self.changes.get("train", {}).get("until")
        return share

    @property
    def kinds(self) -> list[str]:
        """Names of its difficulties, or of its variants."""
        return self.difficulties or list(self.variants)


class Panel(Settings):
    """Every architecture on every setting, at every difficulty and size."""

    settings: list[str] = Field(min_length=1)
    arms: list[str] = Field(min_length=1)  # complete names of architectures
    sizes: list[str] = []  # such as 8L512D, or 1L16D2H with two heads; empty: the preset's
    shared: bool = False  # runs of another figure, which claims of this one compare with

    @field_validator("sizes")
    @classmethod
    def _are_sizes(cls, sizes: list[str]) -> list[str]:
        for size in sizes:
            parse_size(size)
        return sizes


class Pair(Settings):
    """One comparison of a claim: mean of `arm` minus mean of `against`, over seeds."""

    arm: str  # an architecture, or one at another size or variant than the claim's: llama@2L16D2H, llama@largest
    against: str
    expect: Literal["higher", "lower", "alike", "not lower"]
    smallest: PositiveFloat  # difference that matters: of accuracies, 0.05 is five points; of steps, 2 is twice as fast

    @property
    def arms(self) -> tuple[str, ...]:
        return self.arm, self.against

    def __str__(self) -> str:
        return f"{self.arm} - {self.against}"


class At(Settings):
    """Where in a scale a claim is tested."""

    setting: str
    difficulty: str | None = None  # or variant; default: the first
    size: str | None = None
    sizes: list[str] = []  # for each seed, the best of these sizes counts
    slices: list[str] = []  # in place of the claim's


class Claim(Settings):
    """How a claim is tested. All of its pairs have to come out as expected."""

    at: dict[Scale, At] = Field(min_length=1)
    pairs: list[Pair] = Field(min_length=1, max_length=6)  # more cannot be decided with five seeds
    slices: list[str] = []  # in place of the setting's
    measure: str | None = None  # in place of the setting's
    relative: bool = False  # differences of a measure as shares of the mean of `against`
    steps_to: Annotated[float, Field(gt=0, lt=1)] | None = None  # how many times faster they reach that accuracy
    part: bool = False  # the pairs test a part of the claim, so it is at most supported in part
    paper: str  # what the paper found, in numbers
    note: str = ""  # how this test differs from the paper's

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for pair in self.pairs for arm in pair.arms))


class Experiment(Settings):
    """One figure or table."""

    title: str
    source: str
    figure: str | None = None  # of the paper's grids: F7
    match: str | None = None  # an architecture, to which the others are adjusted
    match_by: str = "parameters"  # or "state", or "state,parameters": what they then have as much of
    paper: list[Panel] = []
    small: list[Panel] = []
    micro: list[Panel] = []
    claims: dict[str, Claim] = {}

    _name: str = ""
    _text: str = ""
    _sha256: str = ""
    _settings: dict[str, Setting] = {}
    _seed_set: int = 0

    @property
    def name(self) -> str:
        return self._name

    @property
    def text(self) -> str:
        """The text of the file."""
        return self._text

    @property
    def sha256(self) -> str:
        """The hash of the file, of the settings that it uses, and of the seed set if it is not 0."""
        return self._sha256

    @property
    def seed_set(self) -> int:
        """Which seeds the experiment trains with. Sets have no seed in common."""
        return self._seed_set

    @property
    def settings(self) -> Mapping[str, Setting]:
        return self._settings

    def panels(self, scale: str) -> list[Panel]:
        if scale not in SCALES:
            raise unknown("scale", scale, SCALES)
        return {"paper": self.paper, "small": self.small, "micro": self.micro}[scale]

    @cached_property
    def scales(self) -> list[str]:
        return [scale for scale in SCALES if self.panels(scale)]


def parse_size(size: str) -> tuple[int, int, int | None]:
    """`8L512D` → layers, width, heads (None: of the preset's width each)."""
    if (match := _SIZE.fullmatch(size)) is None:
        raise expected("sizes", "layers and width, such as 8L512D, or 1L16D2H with two heads", size)
    layers, width, heads = match.groups()
    return int(layers), int(width), int(heads) if heads else None


def names() -> list[str]:
    """Names of the experiments in the package, in the order of the paper."""
    return sorted((path.stem for path in FIGURES.glob("*.yaml")), key=lambda name: (_number(name), name))


def _number(name: str) -> int:
    return int(digits[0]) if (digits := re.findall(r"\d+", name)) else 10_000


def find(name_or_path: str) -> Path:
    """The file of an experiment: one of ours by its name, or any by its path."""
    if name_or_path in names():
        return FIGURES / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        return path
    raise unknown("experiment", name_or_path, [*names(), "all", "predict"])


def load(name_or_path: str, *, seed_set: int = 0, trust: bool = False) -> Experiment:
    """Load and check an experiment. seed_set: our runs have 0; another one repeats the experiment from scratch. trust:
    the file may name Python code even if it is neither ours nor in the user's own folder.

    ValueError in one line, with the file: an unknown key, a setting or architecture that a claim names and no panel
    trains, or code that is not trusted.
    """
    path = find(name_or_path)
    if not 0 <= seed_set <= MAX_SEED_SET:
        raise expected("--seed-set", f"an integer from 0 to {MAX_SEED_SET}", seed_set)
    raw, _ = read_yaml(path)
    try:
        if not isinstance(raw, dict):
            raise expected("experiment", "a YAML mapping", raw)
        experiment = _valid(Experiment, raw)
        if not trust and not is_yours(path):
            _refuse_code(experiment)
        panels = [panel for scale in SCALES for panel in experiment.panels(scale)]
        named_settings = dict.fromkeys(name for panel in panels for name in panel.settings)
        experiment._settings = used = {name: setting(name) for name in named_settings}
        for number, claim in experiment.claims.items():
            _check_claim(experiment, number, claim)
    except ValueError as error:
        key = error.key if isinstance(error, InvalidSetting) else ""
        raise InvalidSetting(key, f"{path.name}: {error}") from None
    return named(experiment, path.stem, read_text(path), used, seed_set)


def named(
    experiment: Experiment, name: str, text: str, settings: Mapping[str, Setting], seed_set: int = 0
) -> Experiment:
    """Set the experiment's name, its text and the settings that it uses, and the sha256 of all of it. Returns it."""
    dumped = json.dumps({key: _registered(each) for key, each in settings.items()}, sort_keys=True)
    experiment._name, experiment._settings, experiment._text = name, dict(settings), text
    experiment._seed_set = seed_set
    of_seeds = f"seed set {seed_set}" if seed_set else ""
    experiment._sha256 = sha256((text + dumped + of_seeds).encode()).hexdigest()
    return experiment


def _registered(setting: Setting) -> dict[str, Any]:
    """The fields in an experiment's sha256. Earlier versions did not have all: those at their default are left out."""
    later = {name for name in ("variants", "first_seed", "widen") if not getattr(setting, name)}
    return setting.model_dump(exclude=later)


def _refuse_code(experiment: Experiment) -> None:
    arms = [arm for scale in SCALES for panel in experiment.panels(scale) for arm in panel.arms]
    arms += [arm for claim in experiment.claims.values() for arm in claim.arms] + [experiment.match or ""]
    if named := list(dict.fromkeys(filter(None, map(reference_of, arms)))):
        what = f"--trust, as this experiment is a program: it runs {', '.join(map(brief, named))}; read it first"
        raise InvalidSetting("arms", f"arms: expected {what}")


def _valid(model: type[M], raw: Any, prefix: str = "") -> M:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise refused(error, model, prefix) from None


def setting_names() -> list[str]:
    """Names in `settings.yaml`, in its order."""
    return list(read_yaml(SETTINGS)[0])


def setting(name: str) -> Setting:
    """An entry of `settings.yaml`. ValueError: there is none of this name."""
    raw = _entries(SETTINGS, SETTINGS.stat().st_mtime_ns)
    if name not in raw:
        raise unknown("setting", name, raw)
    return _valid(Setting, raw[name], f"{name}.")


@cache
def _entries(path: Path, modified: int) -> Mapping[str, Any]:
    """All settings, read once: experiments look up hundreds, and reading takes 10 ms."""
    return read_yaml(path)[0]


def places(experiment: Experiment, at: At, arm: str) -> list[tuple[str, str | None, str | None]]:
    """(architecture, difficulty or variant, size) of an arm of a claim, for each of its sizes."""
    arch, _, other = arm.partition("@")
    kinds = experiment.settings[at.setting].kinds
    size = other if _SIZE.fullmatch(other) else ""
    kind = other if other and not size else at.difficulty or (kinds[0] if kinds else None)
    sizes: list[str | None] = [size] if size else [*at.sizes] or [at.size]
    return [(arch, kind, each) for each in sizes]


def _check_claim(experiment: Experiment, number: str, claim: Claim) -> None:
    if claim.steps_to is not None and (claim.relative or claim.measure is not None):
        raise expected(f"claims.{number}.steps_to", "no measure and not relative beside it", claim.steps_to)
    for place, pair in enumerate(claim.pairs):
        if claim.steps_to is not None and pair.smallest <= 1:
            raise expected(f"claims.{number}.pairs.{place}.smallest", "a ratio of steps > 1", pair.smallest)
        if pair.arm == pair.against:
            raise expected(f"claims.{number}.pairs.{place}.against", "another arm", pair.against)
    for scale, at in claim.at.items():
        if scale not in experiment.scales:
            raise expected(f"claims.{number}.at", f"scales with runs ({', '.join(experiment.scales)})", scale)
        panels = [panel for panel in experiment.panels(scale) if at.setting in panel.settings]
        if not panels:
            key, trained = (
                f"claims.{number}.at.{scale}.setting",
                {s for p in experiment.panels(scale) for s in p.settings},
            )
            raise InvalidSetting(key, unknown(key, at.setting, trained, "settings"))
        seeds, level = max(experiment.settings[at.setting].looks.items(), default=(0, 1.0))
        needed = next(n for n in itertools.count() if 2 ** (1 - n) <= level / len(claim.pairs))
        if claim.steps_to is not None and 0 < seeds < needed:  # see `canonlm.runs.speed`
            raise expected(f"claims.{number}.at.{scale}.setting", f"{needed} fresh seeds for speeds", at.setting)
        kinds, measure = experiment.settings[at.setting].kinds, claim.measure or experiment.settings[at.setting].measure
        if measure is None and claim.relative:
            raise expected(f"claims.{number}.relative", "a measure: ratios of accuracies have no safe interval", True)
        for place, pair in enumerate(claim.pairs):
            if measure is None and claim.steps_to is None and pair.smallest >= 1:
                what = "a difference of accuracies < 1 (0.05 is five points)"
                raise expected(f"claims.{number}.pairs.{place}.smallest", what, pair.smallest)
        for arm in claim.arms:
            for arch, kind, size in places(experiment, at, arm):
                sizes = {each for panel in panels if arch in panel.arms for each in (*panel.sizes,) or (None,)}
                if not sizes or (kind is not None and kind not in kinds and "@" in arm):
                    trained = {arm for panel in panels for arm in panel.arms}
                    message = unknown(f"arm of {at.setting} at {scale} scale", arm, trained, "arms")
                    raise InvalidSetting(f"claims.{number}", f"claims.{number}: {message}")
                for key, value, choices in (
                    ("difficulty", kind, set[str | None](kinds) or {None}),
                    ("size", size, sizes),
                ):
                    if value not in choices:
                        listed = ", ".join(sorted(filter(None, choices))) or "none, as its runs have none"
                        raise expected(f"claims.{number}.at.{scale}.{key}", listed, value)
