"""The commands that read each damaged file, one per line."""

from dataclasses import dataclass

from abuse.bases import PLAY

from canonlm import tasks


@dataclass(frozen=True)
class Case:
    """`command` runs in a copy of the folder `base`, of which one file that matches `damaged` is damaged.

    result: files with the results of the command. reported: its standard output is a part of the result. sealed: files
    whose damage a checksum detects: the result is the same, or the command reports the damage. children: it may start
    processes. large: a number in the file may request any amount of work, which is done. written: standard output is
    generated text. streams: it reads a file from beginning to end, even if that takes long.
    """

    name: str
    base: str
    damaged: str
    command: str
    result: tuple[str, ...] = ()
    reported: bool = True
    sealed: str = ""
    children: bool = False
    large: bool = False
    written: bool = False
    streams: bool = False


CASES = [
    # configurations
    Case("recipes show", "recipe", "run.yaml", "recipes show run.yaml"),
    Case("recipes diff", "recipe", "run.yaml", "recipes diff run.yaml debug"),
    Case("plan", "recipe", "run.yaml", "plan run.yaml --gpus 1"),
    Case("train", "recipe", "run.yaml", "train run.yaml train.steps=2 --out out", reported=False, large=True),
    # run folders
    Case("train, stopped", "stopped", "run/*", "train run.yaml --out run",
         ("run/metrics.jsonl", "run/result.json"), reported=False, sealed="run/checkpoints/*"),
    Case("train, finished", "finished", "run/*", "train run.yaml --out run", reported=False,
         sealed="run/checkpoints/*"),
    Case("train, their configuration", "finished", "run/config.yaml",
         "train run/config.yaml train.steps=2 --out out", reported=False, large=True),
    Case("train, text", "text_run", "*", "train run.yaml --out run", reported=False, large=True),
    Case("export", "finished", "run/*", "export run out", ("out/*",), sealed="run/checkpoints/*"),
    Case("export, text", "text_run", "*", "export run out", ("out/*",), sealed="run/checkpoints/*"),
    Case("eval", "finished", "run/*", "eval run --suite playground --out evals", ("evals/results.json",),
         sealed="run/checkpoints/*", large=True),
    Case("eval again", "finished", "run/*", "eval run --suite playground", large=True),
    Case("generate", "finished", "run/*", "generate run bos --max-tokens 4", sealed="run/checkpoints/*", written=True),
    Case("generate, text", "text_run", "*", "generate run Cats --max-tokens 4", sealed="run/checkpoints/*",
         written=True),
    Case("probe", "grammar", "run/*", "probe run --fit 4 --test 4", ("run/probe.json",), sealed="run/checkpoints/*"),
    Case("report", "finished", "run/*", "report run --table", sealed="run/checkpoints/*"),
    Case("report, page", "finished", "run/*", "report run --out page.html", sealed="run/checkpoints/*"),
    Case("report, text", "text_run", "run/*", "report run --table", sealed="run/checkpoints/*"),
    Case("results", "finished", "run/*", "results run --csv found.csv", sealed="run/checkpoints/*"),
    Case("report, results", "finished", "run/evals/*", "report run/evals/step-00000006 --table"),
    Case("export, self-contained", "finished", "run/*", "export run out --self-contained", ("out/*",),
         sealed="run/checkpoints/*"),
    # play folders
    Case("play, finished", "play", "play/*", PLAY, children=True, large=True),
    Case("report, play", "play", "play/*", "report play --table", sealed="play/runs/*/checkpoints/*"),
    Case("results, play", "play", "play/*", "results play --json found.json", sealed="play/runs/*/checkpoints/*"),
    # queues, experiments, kept rows
    Case("work, status", "queue", "queue/*", "work queue --status"),
    Case("work, plan", "queue", "queue/*", "work queue --dry-run", large=True),
    Case("work, finished", "finished_queue", "queue/*", "work queue", children=True, large=True),
    Case("replicate", "experiment", "mine.yaml", "replicate mine.yaml --dry-run", large=True),
    Case("claims", "kept_rows", "kept/*", "claims C06 --runs kept"),
    # saved models
    Case("generate, exported", "exported", "model/*", "generate model Cats --max-tokens 4", written=True),
    Case("generate, prompts", "exported", "prompts.jsonl",
         "generate model --prompts prompts.jsonl --out answers.jsonl --max-tokens 4", ("answers.jsonl",), written=True),
    Case("eval, a text", "exported", "text.txt",
         "eval model --suite multihop background=9 people=2 n=1 text=text.txt --beyond-context --out out",
         streams=True),
    Case("eval, facts", "exported", "qa1.jsonl",
         "eval model --suite babilong task=qa1 n=1 facts=. --beyond-context --batch-size 2 --out evals"),
    Case("convert, exported", "exported", "model/*", "convert model out --to hf", ("out/*",)),
    Case("convert, hf", "published_hf", "model/*", "convert model out", ("out/*",)),
    Case("convert, lingua", "published_lingua", "model/*", "convert model out", ("out/*",)),
    # data
    Case("data check", "prepared", "data/*", "data check data", sealed="data/*"),
    Case("data prepare", "inputs", "*",
         "data prepare out --input a.jsonl --input b.jsonl.gz --input c.txt --input d.parquet "
         "--tokenizer tokenizer.json --workers 1 --max-bad 9", ("out/*.ds",), children=True, streams=True),
    Case("data prepare, again", "prepared", "*",
         "data prepare data --input a.jsonl --tokenizer bytes --validation 0.2 --workers 1", children=True,
         streams=True),
    Case("data prepare, half-done", "half_done", "data/work/*",
         "data prepare data --input a.jsonl --tokenizer bytes --validation 0.2 --workers 1", children=True,
         streams=True),
    # answers, to graders
    Case("verify, table", "answers", "copying.parquet", "data dump copying --n 4 --verify copying.parquet",
         streams=True),
    *(Case(f"verify, {task}", "answers", f"{task}.jsonl", f"data dump {task} --n 4 --verify {task}.jsonl", streams=True)
      for task in tasks.names()),
]  # fmt: skip

SETTINGS = {
    **{f"data show {name} --n 1": [f"task.{key}" for key in ("x", *tasks.find(name).Spec.model_fields)]
       for name in tasks.names()},
    "plan run.yaml --gpus 1": ("arch", "model.num_hidden_layers", "train.batch_size", "model.fields.rope_theta"),
    "recipes show run.yaml": (
        "arch", "task.name", "model.hidden_size", "model.fields", "data.seq_len", "train.steps", "train.optim.lr",
        "train.optim.betas", "parallel.tp", "track", "profile", "on_checkpoint", "text.sources",
    ),
}  # fmt: skip
"""Commands, and those of their settings whose values are replaced by junk."""
