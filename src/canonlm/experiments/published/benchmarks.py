"""The columns of the published tables: group, task, slice and metric of each.

Tasks have the names of the lm-evaluation-harness where it has them, and metrics too, so that a model evaluated with
`canonlm eval` lines up. The tables themselves name no metric. `acc_norm` is inferred, from what the open models in the
same table are known to score by it, and so is `contains` for the retrieval tasks, which are those of arXiv 2407.05483:
there NQ, TriviaQA and DROP come with the text that has the answer. The curves of `triviaqa` are without such a text.
"""

from dataclasses import dataclass

PERCENT = "%"


@dataclass(frozen=True)
class Benchmark:
    """One column. `unit`: "%" for shares; "" for perplexities, of which less is better."""

    column: str
    group: str
    task: str
    slice: str
    metric: str

    @property
    def unit(self) -> str:
        return "" if self.metric in LOWER_IS_BETTER else PERCENT


LOWER_IS_BETTER = frozenset({"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "loss", "kl"})

ALL = "all"
_STANDARD = {
    "LMB": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"), "Hella": ("hellaswag", "acc_norm"),
    "Wino": ("winogrande", "acc"), "ARC-e": ("arc_easy", "acc"), "ARC-c": ("arc_challenge", "acc_norm"),
    "SIQA": ("social_iqa", "acc"), "BoolQ": ("boolq", "acc"), "COPA": ("copa", "acc"),
    "OBQA": ("openbookqa", "acc_norm"), "RACE": ("race", "acc"), "CSQA": ("commonsense_qa", "acc"),
    "MMLU": ("mmlu", "acc"),
}  # fmt: skip
_RETRIEVAL = {
    "FDA": "fda", "SWDE": "swde", "NQ": "nq", "Squad": "squad_completion", "TriviaQA": "triviaqa", "Drop": "drop",
}  # fmt: skip
_LENGTHS = ("0k", "0.5k", "1k", "2k", "3k", "4k", "5k", "6k")


def _benchmarks() -> list[Benchmark]:
    columns = [Benchmark("lm_eval_avg13", "standard", "standard", "average of 13", "acc")]
    columns += [Benchmark(name, "standard", task, ALL, metric) for name, (task, metric) in _STANDARD.items()]
    columns += [Benchmark("avg10", "standard", "standard", "average of 10", "acc")]  # of the open models alone
    columns += [
        Benchmark("Wiki_ppl", "perplexity", "wikitext", ALL, "word_perplexity"),
        Benchmark("LMB_ppl", "perplexity", "lambada_openai", ALL, "perplexity"),
        Benchmark("JRT_avg12", "retrieval", "retrieval", "average of 12", "contains"),
    ]
    for name, task in _RETRIEVAL.items():
        columns += [Benchmark(name, "retrieval", task, "once", "contains")]
        columns += [Benchmark(f"{name}2", "retrieval", task, "twice", "contains")]
    hops = [f"{k}hop-{length}" for k in (1, 2) for length in _LENGTHS]
    columns += [Benchmark(name, "multihop", "multihop", name, "exact") for name in hops]
    columns += [Benchmark("babilong_avg20", "babilong", "babilong", "average of 20", "correct")]
    stories = [f"qa{i}-{length}" for i in range(1, 6) for length in ("0k", "1k", "2k", "4k")]
    columns += [Benchmark(f"babilong-{name}", "babilong", "babilong", name, "correct") for name in stories]
    for i in (1, 2, 3):
        for length in ("0.5k", "2k", "4k", "5k", "6k", "7k", "8k"):
            columns += [Benchmark(f"niah-S{i}-{length}", "needle", f"niah_single_{i}", length, "contains")]
    return columns


BENCHMARKS = {benchmark.column: benchmark for benchmark in _benchmarks()}
"""By column, in the order of the tables."""

CURVES = {task: (task, ALL, metric) for task, metric in _STANDARD.values()} | {
    "triviaqa": ("triviaqa", ALL, "exact_match")
}
"""(task, slice, metric) of each training curve."""

AVERAGES = {
    "lm_eval_avg13": tuple(_STANDARD),
    "JRT_avg12": tuple(f"{name}{times}" for name in _RETRIEVAL for times in ("", "2")),
    "babilong_avg20": tuple(name for name, b in BENCHMARKS.items() if b.group == "babilong" and "-" in name),
    "avg10": tuple(name for name in _STANDARD if name not in ("LMB", "BoolQ", "COPA")),
}
"""The columns behind each column of averages. Scores are printed with one decimal; averages were taken before
rounding."""

SHORT = ("lm_eval_avg13", "LMB", "Hella", "ARC-c", "MMLU", "Wiki_ppl", "JRT_avg12", "1hop-4k", "2hop-0k",
         "babilong_avg20")  # fmt: skip

GROUPS: dict[str, tuple[str, ...]] = {
    "short": SHORT,
    **{
        group: tuple(name for name, b in BENCHMARKS.items() if b.group == group)
        for group in dict.fromkeys(b.group for b in BENCHMARKS.values())
    },
}
"""Columns to be shown together, by the name of `canonlm results --group`."""


def _difficulties() -> dict[str, dict[str, dict[str, object]]]:
    one, two = ({"name_vocab": 50, "min_name_len": 1, "max_name_len": 2},
                {"name_vocab": 3, "min_name_len": 5, "max_name_len": 7})  # fmt: skip
    depo: dict[str, dict[str, object]] = {}
    for kind, sizes, max_hops, names in (("depo1", (225, 300, 375), 8, one), ("depo2", (75, 100, 125), 16, two)):
        for N in sizes:
            depo[f"{kind}-{N}"] = {"N": N, "K": max_hops, "M": 10, **names}
            depo[f"{kind}-{N}-k4"] = {"N": N, "K": 4, "M": 10, **names}
    words: tuple[tuple[str, tuple[int, ...], dict[str, object]], ...] = (
        ("brevo1", (70, 90, 110), {"name_vocab": None, "min_name_len": 1, "max_name_len": 1}),
        ("brevo2", (30, 40, 50), {"name_vocab": 4, "min_name_len": 2, "max_name_len": 4}),
    )
    brevo: dict[str, dict[str, object]] = {
        f"{kind}-{N}": {"N": N, "query": "last", **names} for kind, sizes, names in words for N in sizes
    }
    fixed = {"test_lengths": None, "ops": "asm", "modulus": 23, "synonyms": True}
    mano: dict[str, dict[str, object]] = {f"mano-{L}": {"L": L, **fixed} for L in (10, 13, 16)}
    lano: dict[str, dict[str, object]] = {name: {"grammar": name} for name in ("cfg3f", "cfg3j", "cfg3k")}
    return {"depo": depo, "brevo": brevo, "mano": mano, "lano": lano}


DIFFICULTIES = _difficulties()
"""Task → name of a difficulty in the paper's grids → all settings of the task, as a run's `config.yaml` has them."""
