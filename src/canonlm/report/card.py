"""Model cards: the README.md of a folder for the Hugging Face Hub. Every number is from the run folder.

Names in a run folder may be somebody else's: they stand in code spans, and the header is written by the Hub's library.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from canonlm.core.user_code import reference_of
from canonlm.report.format import count_of, number, percent, quantity, shown, span
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.folder import to_yaml
from canonlm.runs.load import Run
from canonlm.runs.rows import Evaluation, one_line
from canonlm.runs.seed_statistics import t_factor, wilson_interval
from canonlm.runs.summary import wilson

MAX_ROWS = 60  # of the table of scores
BY_EVAL = (
    "Later, by `canonlm eval`. The interval of a mean over documents says how much other documents would change it:"
)
LEFT_OUT = ("on_checkpoint", "profile", "track")
CODE = (
    "The folder has its own code, a copy of canonlm's (Apache 2.0, see LICENSE), which needs torch and transformers "
    "alone: read it, then pass `trust_remote_code=True`."
)
PACKAGE = "`import canonlm` registers the model's type; the folder has no code of its own."
OUTSIDE = (
    "The folder has the weights alone: the program is the file of that name. canonlm opens the run in place of this "
    "folder, as in `canonlm generate RUN --trust-remote-code`."
)
WEIGHTS = (
    "No licence of the weights has been chosen: add a line such as `license: apache-2.0` to the header of this file. "
    "The data may limit the choice."
)


def of_run(
    run: Run, step: int, name: str, *, parameters: int, tokenizer: bool, code: bool,
    evaluated: Sequence[Evaluated] = (),
) -> str:  # fmt: skip
    """The card of the model of a run after `step` steps. name: of the model; code: whether the folder has its code;
    evaluated: results of `canonlm eval` for this step."""
    row = next((row for row in run.evals if row.step == step), None)
    scores = _scores(run, row) if row else []
    later = [_of_score(entry, score) for one in evaluated for entry in one.entries for score in entry["scores"]
             if not score["slice"]]  # fmt: skip
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["canonlm"], model_name=name,
        eval_results=[each for each, _ in (*scores, *later)] or None,
    )  # fmt: skip
    head = ["", "score", "95% interval", "of"]
    of_table = [head, *(cells for _, cells in scores[:MAX_ROWS])]
    when = f"At the evaluation after {count_of(step, 'step')}."
    missing = f"The model was not evaluated after step {step:,}."
    body = [
        f"A language model of the architecture {_code(run.arch)} with {parameters:,} parameters, trained by canonlm.",
        "## Use it\n\n" + (OUTSIDE if reference_of(run.arch) else _loading(name, code=code, tokenizer=tokenizer)),
        "## Scores\n\n" + (f"{when}\n\n{_table(of_table)}" if scores else missing),
        *([f"{BY_EVAL}\n\n{_table([head, *(cells for _, cells in later[:MAX_ROWS])])}"] if later else []),
        "## Data\n\n" + _data(run),
        "## Training\n\n" + _table([["", ""], *_training(run, step)]),
        f"The run's settings:\n\n~~~~yaml\n{_recipe(run.config)}~~~~",
        f"## Licence\n\n{WEIGHTS}",
    ]
    return _card(data, name, body)


def of_canonized(name: str, host: str, sites: str, *, parameters: int, added: int, tokenizer: bool, code: bool) -> str:
    """The card of a model of transformers with Canon layers at `sites`. host: a folder, or a name on the Hub."""
    on_hub = host if host.count("/") == 1 and not host.startswith((".", "/", "~")) else None
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", tags=["canonlm"], base_model=on_hub,
        base_model_relation="finetune" if on_hub else None,
    )  # fmt: skip
    base = _code(on_hub or host.rstrip("/").rpartition("/")[2])
    body = [
        f"{base} with Canon layers at {_code(sites)}, put in by canonlm: "
        f"{added:,} of its {parameters:,} parameters. It has not been trained since.",
        "## Use it\n\n" + _loading(name, code=code, tokenizer=tokenizer),
        f"## Licence\n\nThe licence of the model without Canon layers applies. {WEIGHTS}",
    ]
    return _card(data, name, body)


def _card(data: ModelCardData, name: str, body: Sequence[str]) -> str:
    return f"---\n{data.to_yaml()}\n---\n\n# {_code(name)}\n\n" + "\n\n".join(body) + "\n"


def _loading(name: str, *, code: bool, tokenizer: bool) -> str:
    place = one_line(name).replace('"', "")
    more = ", trust_remote_code=True" if code else ""
    lines = [] if code else ["import canonlm"]
    lines += [f"from transformers import AutoModelForCausalLM{', AutoTokenizer' * tokenizer}", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{place}"{more})']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{place}"{more})'] if tokenizer else []
    return "```python\n" + "\n".join(lines) + f"\n```\n\n{CODE if code else PACKAGE}"


def _scores(run: Run, row: Evaluation) -> list[tuple[EvalResult, list[str]]]:
    """Each score for the header, and as cells."""
    task = run.task_label if run.task.name != "text" else "held-out text"
    scores = []
    for key, count in row.slices.items():
        label = quantity(run.task, key).label
        cells = [label, percent(count.accuracy), span(*wilson(count)), f"{count.total:,} answers"]
        scores.append((("accuracy", count.accuracy), cells))
    for key, value in row.measures.items():
        column = quantity(run.task, key)
        scores.append(((key, value), [column.label, column.say(value), "–", ""]))
    return [
        (EvalResult(task_type="text-generation", dataset_type=task, dataset_name=task, metric_type=kind,
                    metric_value=value, metric_name=cells[0]), [_code(cells[0]), *cells[1:]])
        for (kind, value), cells in scores
    ]  # fmt: skip


def _of_score(entry: Mapping[str, Any], score: Mapping[str, Any]) -> tuple[EvalResult, list[str]]:
    """A score of `canonlm eval`, for the header and as cells. Its interval is over answers, or over documents."""
    value, stderr, n = score["value"], score["stderr"], score["n"]
    interval = "–"
    if score["share"] and n:
        interval = span(*wilson_interval(value, n))
    elif stderr is not None and n and n > 1:
        interval = span(value - t_factor(n) * stderr, value + t_factor(n) * stderr, number)
    name, measure = entry["name"], score["measure"]
    what = "document" if entry["suite"] == "text" else "answer"
    cells = [_code(f"{name}, {measure}"), (percent if score["share"] else number)(value), interval]
    of_header = EvalResult(task_type="text-generation", dataset_type=name, dataset_name=name, metric_type=measure,
                           metric_value=value, metric_name=measure)  # fmt: skip
    return of_header, [*cells, count_of(n, what) if n else ""]


def _data(run: Run) -> str:
    if not run.sources:
        return f"The synthetic task {_code(run.task_label)}: an endless stream of samples."
    rows = [[_code(each.name), f"{each.weight:g}", _code(each.content or "unknown")] for each in run.sources]
    return _table([["text", "weight", "sha256 of its index"], *rows])


def _training(run: Run, step: int) -> list[list[str]]:
    train, data = _group(run.config, "train"), _group(run.config, "data")
    tokens = [value for value in (train.get("batch_size"), data.get("seq_len")) if isinstance(value, int)]
    facts = {
        "steps": f"{step:,}" + (f" of {run.steps:,}" if run.steps and run.steps != step else ""),
        "tokens": f"{step * tokens[0] * tokens[1]:,}" if len(tokens) == 2 else None,
        "batch": f"{tokens[0]:,} windows of {tokens[1]:,} tokens" if len(tokens) == 2 else None,
        "learning rate": f"{run.lr:g}",
        "schedule": _group(train, "optim").get("schedule"),
        "precision": train.get("precision"),
        "seed": run.seed,
        "machine": run.env.get("machine"),
        **{name: run.env.get(name) for name in ("canonlm", "torch", "transformers")},
    }
    return [[name, _code(shown(value))] for name, value in facts.items() if value is not None]


def _recipe(config: Mapping[str, Any]) -> str:
    """The settings, without commands, and the places of texts on the machine that trained."""
    if sources := _group(_group(config, "text"), "sources"):
        weights = {name: {"weight": _group(sources, name).get("weight")} for name in sources}
        config = {**config, "text": {"sources": weights}}
    kept = {key: value for key, value in config.items() if value is not None and key not in LEFT_OUT}
    return to_yaml(kept).replace("~~~", "")


def _group(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    group = config.get(key)
    return group if isinstance(group, Mapping) else {}


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])


def _code(text: object) -> str:
    """A code span, also in a table."""
    return "`" + one_line(str(text)).replace("`", "'").replace("|", "/") + "`"
