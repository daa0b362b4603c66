"""A run's configuration, complete and checked. Recipes (`canonlm.train.load_config`) and presets resolve to it.

Run folders have the resolved configuration in `config.yaml`; two runs differ only if these files differ.
"""

import re
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from canonlm import tasks
from canonlm.core.errors import InvalidSetting, expected, refused, unknown
from canonlm.runs import folder, identity
from canonlm.runs.rows import slice_key
from canonlm.train import profile


class Settings(BaseModel):
    """Base of the settings classes. Strict, like the tasks' settings: neither "3" nor true counts as a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Size = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""Larger sizes are mistakes, and would overflow."""

Steps = Annotated[int, Field(gt=0, le=2**53)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Model(Settings):
    """The model's sizes; `arch` fixes the rest. `fields` sets any field of the model's own configuration."""

    num_hidden_layers: Annotated[int, Field(gt=0, le=2_000)]
    hidden_size: Size
    num_attention_heads: Size
    vocab_size: Size | None = None  # for text: that of its tokenizer; a task has its own
    fields: dict[str, Any] = {}
    weights: str | None = None  # the folder of a saved model to start from, which decides architecture and sizes
    weights_sha256: str | None = None  # written by canonlm
    matched: dict[str, list[int]] = {}  # fields that `canonlm play --match` changed: before, after

    @model_validator(mode="after")
    def _weights_are_known(self) -> "Model":
        if self.weights is not None and self.weights_sha256 is None:
            what = "no value: start from weights by `canonlm train RECIPE model.weights=FOLDER`, or by `canonlm launch`"
            raise expected("model.weights", what, self.weights)
        return self


_FORMS = {
    "task": (dict, "a group of settings, such as {name: depo}"),
    "text": (dict, "a group of settings, such as {sources: {web: {path: data/web}}}"),
    "sources": (dict, "a group of settings, such as {path: data/web}"),
    "validation": (str, "a folder, such as data/web"),
    "track": (list, "a list, such as [wandb]"),
}


def _check_form(field: Any, key: Any, value: Any) -> None:
    """InvalidSetting, with an example, for settings where a bare name or path is a likely mistake."""
    kind, what = _FORMS[field]
    if not isinstance(value, kind):
        raise expected(key, what, value)


class Source(Settings):
    """One part of a mix of texts."""

    path: str  # a folder made by `canonlm data prepare`, or python-stdlib (see launch/recipes/debug.yaml)
    weight: PositiveFloat = 1.0  # its share of the windows, in proportion to the other sources' weights


class Text(Settings):
    """Tokens to read, from folders made by `canonlm data prepare`."""

    sources: dict[str, Source] = Field(min_length=1)
    validation: dict[str, str] = {}  # name: folder; its held-out part (else all of it) is evaluated.
    # Default: the held-out part of every source that has one

    @field_validator("sources", "validation", mode="before")
    @classmethod
    def _well_formed(cls, texts: Any, info: ValidationInfo) -> Any:  # the two forms are easily confused
        for name, text in texts.items() if isinstance(texts, dict) else ():
            _check_form(info.field_name, f"text.{info.field_name}.{name}", text)
        return texts

    @property
    def folders(self) -> dict[str, str]:
        """All folders, by the key of the setting."""
        sources = {f"text.sources.{name}.path": source.path for name, source in self.sources.items()}
        return sources | {f"text.validation.{name}": path for name, path in self.validation.items()}


class Data(Settings):
    """Windows of concatenated instances of a task, or documents of text."""

    seq_len: Size
    loss_on: Literal["answer", "all"] = "all"
    isolate_documents: bool = False  # False, as in the paper: documents of a window see each other
    seed: Seed | None = None  # of the training windows; None: train.seed
    workers: Annotated[int, Field(ge=0, le=1024)] = 1  # threads that sample ahead; changes nothing but speed
    # During training, compare the sha256 of every shard that is read with its index.json. True: every machine does, as
    # each may have a disk of its own; once: one process of all does, as they read the same files.
    verify: Literal[True, False, "once"] = True


class Optim(Settings):
    """AdamW; linear warm-up, then decay to `final_lr_ratio` of the rate (wsd: warm-up, stable, decay)."""

    lr: PositiveFloat
    betas: tuple[float, float] = Field((0.9, 0.98), strict=False)  # YAML has no tuples, only lists
    eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.03
    decay: Literal["matrices", "all"] = "matrices"  # matrices: no weight decay on norms, biases, A_log, dt_bias, D
    warmup_steps: NonNegativeInt = 1000
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_steps: PositiveInt | None = None  # for wsd: the number of last steps, in which the rate falls linearly
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    lr_scale: dict[str, PositiveFloat] = {}  # factors of lr by parameter name: {"*canon*": 10}; the first match counts
    grad_clip: PositiveFloat | None = 1.0

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise expected("train.optim.betas", "two numbers >= 0 and < 1", betas)
        return betas

    @model_validator(mode="after")
    def _decay_steps_only_for_wsd(self) -> "Optim":
        key = "train.optim.decay_steps"
        if self.schedule == "wsd" and self.decay_steps is None:
            raise InvalidSetting(key, f"{key}: missing; expected an integer > 0 with schedule wsd")
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise expected(key, "no value, as only schedule wsd uses it", self.decay_steps)
        return self


class Train(Settings):
    """The training loop. Intervals are in optimizer steps."""

    steps: Steps = None  # type: ignore[assignment]  # default: the whole training stream, if the task's stream ends
    batch_size: Size  # windows per step
    seed: Seed = 0  # for initial weights, dropout and everything without a seed of its own
    freeze: list[str] = []  # parameters that do not train, by name: ["*", "!*canon*"] trains only what has canon in it
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast; the weights stay in fp32
    compile: bool = False
    deterministic: bool = False  # the same bits in every run on the same devices, by operators that may be slower
    device: str = "auto"  # auto: cuda if available, else cpu
    num_threads: Annotated[int, Field(gt=0, le=65_536)] | None = (
        None  # CPU threads; sums, and so results, depend on their number. None: torch's choice
    )
    log_every: PositiveInt = 10
    eval_every: PositiveInt
    eval_size: Size  # test windows, instances, sentences or people, depending on the task
    eval_seed: Seed | None = None  # of the test samples; None: train.seed
    eval_split: Literal["test", "validation"] = "test"  # validation: a separate test, for choosing settings; for text:
    # the next eval_size held-out windows
    eval_beyond: Size | None = None  # for text: also the loss on this number of tokens beyond data.seq_len
    until: Annotated[float, Field(gt=0, le=1)] | None = None  # end after an evaluation with at least this score
    until_slices: list[str] = []  # of these slices (k=2), on average; empty: of the task's score
    checkpoint_every: PositiveInt
    keep_checkpoints: PositiveInt = 2  # the number of newest checkpoints to keep
    keep_every: PositiveInt | None = None  # also keep those whose step is a multiple of this
    on_nonfinite: Literal["stop", "skip"] = "stop"  # at a step whose loss or gradient is not finite
    optim: Optim


class Parallel(Settings):
    """How the work is spread over processes, one per device; the launcher (`torchrun`, SLURM, `canonlm launch`) sets
    their number. Changes speed and memory; the numbers only by rounding."""

    tp: Size = 1  # tensor parallel: the number of devices that share every layer
    cp: Size = 1  # context parallel: the number of devices that share every window, each with a part of its tokens
    dp_replicate: Size = 1  # copies of the model; each is sharded over the remaining devices
    micro_batch_size: Size | None = None  # windows that a device processes at once; None: its share of the batch
    # A number: the share of a block's activations to keep at most; the compiler chooses which (train.compile).
    activation_checkpointing: Literal["none", "selective", "full"] | float = "none"
    float8: bool = False  # linear layers in float8, by torchao, on GPUs that support it
    start_timeout: Seconds = 300.0  # for all processes to join the run; it ends, and names those that have not
    timeout: Seconds = 100.0  # without a heartbeat of a process: the run ends, and names it

    @field_validator("activation_checkpointing", mode="before")
    @classmethod
    def _mode_or_share(cls, kept: Any) -> Any:
        if kept in ("none", "selective", "full") or (isinstance(kept, float) and 0 < kept < 1):
            return kept
        what = "none, selective, full or a number > 0 and < 1, the share to keep"
        raise expected("parallel.activation_checkpointing", what, kept)


class RunConfig(Settings):
    """All settings of a run."""

    preset: str | None = None
    arch: str
    task: dict[str, Any] | None = None  # its name and all its settings
    text: Text | None = None  # instead of a task
    model: Model
    data: Data
    train: Train
    parallel: Parallel = Parallel()
    profile: str | None = None  # "10:13": a Chrome trace of steps 10, 11, 12
    track: list[Literal["tensorboard", "wandb"]] = []  # beside metrics.jsonl
    on_checkpoint: str | None = None  # a shell command to start in the background at each {checkpoint} of the {run}

    @field_validator("task", "text", "track", mode="before")
    @classmethod
    def _well_formed(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _check_form(info.field_name, info.field_name, value)
        return value

    @field_validator("task")
    @classmethod
    def _complete_task(cls, task: dict[str, Any] | None) -> dict[str, Any] | None:
        if task is None:
            return None
        if not isinstance(name := task.get("name"), str):
            raise expected("task.name", f"one of {', '.join(tasks.names())}, or FILE.py:NAME", name)
        return {"name": name, **build_task(task).spec.model_dump()}

    @field_validator("profile", mode="before")
    @classmethod
    def _valid_profile(cls, steps: Any) -> Any:
        if steps is not None:
            profile.bounds(steps)
        return steps

    @model_validator(mode="after")
    def _task_or_text(self) -> "RunConfig":
        if (self.task is None) == (self.text is None):
            number = "neither" if self.task is None else "both"
            raise InvalidSetting(
                "task", f"expected either task (a playground task) or text (token shards), got {number}"
            )
        return self

    @model_validator(mode="after")
    def _windows_suit_the_task(self) -> "RunConfig":
        if (task := self.built_task) is None:
            if self.data.loss_on == "answer":
                raise expected("data.loss_on", "all, for text", "answer")
            return self
        if "loss_on" not in self.data.model_fields_set:
            raise InvalidSetting("data.loss_on", "data.loss_on: missing; expected 'answer' or 'all'")
        if self.model.vocab_size is not None:
            what = f"no value, as {task.name} has its own vocabulary"
            raise expected("model.vocab_size", what, self.model.vocab_size)
        if self.data.seq_len < task.min_seq_len:
            what = f"at least {task.min_seq_len}, for the test samples of {task}"
            raise expected("data.seq_len", what, self.data.seq_len)
        if self.data.isolate_documents and not task.can_isolate:
            what = f"false: in {task.name} an instance ends where the next one starts, which has to be predicted"
            raise expected("data.isolate_documents", what, True)
        return self

    @model_validator(mode="after")
    def _steps_suit_the_stream(self) -> "RunConfig":
        train, task, key = self.train, self.built_task, (self.data_seed, self.data.seq_len)
        to_last_batch = ((train.steps or 1) - 1) * train.batch_size  # which may be incomplete
        if train.steps is not None and (task is None or task.has_windows(*key, to_last_batch + 1)):
            return self
        windows = None if task is None else task.training_windows(*key)
        max_steps = None if windows is None else -(-windows // train.batch_size)
        if train.steps is None:
            if max_steps is None:
                raise InvalidSetting("train.steps", "train.steps: missing; expected an integer > 0")
            return self.model_copy(update={"train": train.model_copy(update={"steps": max_steps})})
        raise expected("train.steps", f"at most {max_steps}, the whole training stream of {task}", train.steps)

    @model_validator(mode="after")
    def _a_compiler_chooses_activations(self) -> "RunConfig":
        kept = self.parallel.activation_checkpointing
        if isinstance(kept, float) and not self.train.compile:
            what = "none, selective or full; a share of what is kept needs train.compile=true"
            raise expected("parallel.activation_checkpointing", what, kept)
        return self

    @model_validator(mode="after")
    def _decay_and_profile_fit_into_the_steps(self) -> "RunConfig":
        optim = self.train.optim
        max_decay_steps = self.train.steps - optim.warmup_steps
        if optim.decay_steps is not None and optim.decay_steps > max_decay_steps:
            what = f"at most train.steps - train.optim.warmup_steps = {max_decay_steps}"
            raise expected("train.optim.decay_steps", what, optim.decay_steps)
        if self.profile is not None and profile.bounds(self.profile)[1] - 1 > self.train.steps:
            raise expected("profile", f"steps up to train.steps = {self.train.steps}", self.profile)
        return self

    @model_validator(mode="after")
    def _eval_settings_suit_the_data(self) -> "RunConfig":
        train, task = self.train, self.built_task
        if task is None and train.eval_seed is not None:
            raise expected("train.eval_seed", "no value, as text is evaluated on its held-out part", train.eval_seed)
        if task is None and train.until is not None:
            raise expected("train.until", "no value, as text has no answers that are right", train.until)
        if train.until_slices and train.until is None:
            raise expected("train.until_slices", "no value without train.until", train.until_slices)
        known = [] if task is None else [slice_key(where) for where in task.slices()]
        if other := [key for key in train.until_slices if key not in known]:
            key = "train.until_slices"
            raise InvalidSetting(key, f"{key}: {unknown('slice', other[0], known)}")
        if task is not None and train.eval_beyond is not None:
            raise expected("train.eval_beyond", "no value, as only text uses it", train.eval_beyond)
        if task is not None and task.tests_what_it_trained_on and train.eval_seed is not None:
            what = f"no value, as {task.name} tests what it trained on, which data.seed decides"
            raise expected("train.eval_seed", what, train.eval_seed)
        return self

    @property
    def data_seed(self) -> int:
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def eval_seed(self) -> int:
        """The seed of a task's test samples."""
        if self.built_task is not None and self.built_task.tests_what_it_trained_on:
            return self.data_seed
        return self.train.seed if self.train.eval_seed is None else self.train.eval_seed

    @cached_property
    def built_task(self) -> tasks.Task | None:
        """None for a run on text."""
        return None if self.task is None else tasks.get(**self.task)

    def to_yaml(self) -> str:
        return folder.to_yaml(self.model_dump(mode="json"))


_RENAMED = {"train.eval_windows": "train.eval_size"}
"""Names of settings in earlier versions."""


def resolve(raw: dict[str, Any]) -> RunConfig:
    """Check and complete a configuration. InvalidSetting (a ValueError) names the first wrong key."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise refused(error, RunConfig, others=task_keys(raw.get("task")), renamed=_RENAMED) from None


def build_task(settings: dict[str, Any]) -> tasks.Task:
    """A task from its name and settings. Errors name keys as in a run's file: `task.N`, not `depo.N`."""
    try:
        return tasks.get(**settings)
    except InvalidSetting as error:
        owner, _, key = error.key.partition(".")
        names = "|".join(map(re.escape, {key, *tasks.find(settings["name"]).Spec.model_fields}))
        message = re.sub(rf"\b{re.escape(owner)}\.(?=({names})\b)", "task.", str(error))
        raise InvalidSetting(f"task.{key or 'name'}", message) from None


def task_keys(task: object) -> list[str]:
    """`task.N` and so on: all settings of a run's task, or none if the task is unknown."""
    try:
        return [f"task.{name}" for name in tasks.find(dict(task)["name"]).Spec.model_fields]  # type: ignore[call-overload]
    except (ValueError, TypeError, KeyError):
        return []


def differences(a: RunConfig, b: RunConfig) -> list[identity.Difference]:
    """(dotted key, value in a, value in b) of all settings that affect results and differ."""
    return identity.differences(a.model_dump(), b.model_dump())


def changes(began: RunConfig, now: RunConfig) -> list[identity.Difference]:
    """The differences that prevent a run from being continued."""
    return identity.changes(began.model_dump(), now.model_dump())
