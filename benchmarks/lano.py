"""How fast Lano's exact answers are, on sampled sentences and one core, beside the original release's.

    python benchmarks/lano.py [--quick] [--json]

Each number is the median over sequences of the milliseconds per call, the best of three calls (other work on the
machine only adds time). "rejected" are sentences with one token replaced that are no longer in the language, "near"
have three tokens replaced, "far" are random terminals of the same length. Memory is the growth of the process's peak
during all calls (Linux only); memory that an earlier grammar freed is reused.

The release's figures are those of its own code (facebookresearch/PhysicsLM4, revision 7580696): median CPU time per
call over 9 to 20 sampled sentences, measured once on the same kind of machine. It is not run here.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np

import canonlm
from canonlm.tasks.lano.grammar import BUILT_IN, Grammar

QUICK = ("cfg3f", "cfg3k")
REPEATS = 3
RELEASE_MS = {
    "cfg3b": {"contains": 3372, "contains, rejected": 3359, "next_token_probs": 2808},
    "cfg3f": {"contains": 1829, "contains, rejected": 3170, "next_token_probs": 1785},
    "cfg3k": {"contains": 12680, "contains, rejected": 14244, "next_token_probs": 11421},
    "cfg3j": {"contains": 9405, "next_token_probs": 7489},
}
RELEASE_MB = {"contains": 3919, "next_token_probs": 1335}  # cfg3j, 676 tokens


def wrong(tokens: np.ndarray, count: int, terminals: int, rng: np.random.Generator) -> np.ndarray:
    """The sequence with `count` tokens replaced by others."""
    changed = tokens.copy()
    at = rng.choice(len(tokens), count, replace=False)
    changed[at] = (changed[at] - 1 + rng.integers(1, terminals, count)) % terminals + 1
    return changed


def milliseconds(function: Callable, grammar: Grammar, sequences: Sequence[np.ndarray]) -> float:
    function(grammar, sequences[0])  # compile, or load from numba's disk cache
    best = []
    for tokens in sequences:
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            function(grammar, tokens)
            seconds.append(time.perf_counter() - start)
        best.append(min(seconds))
    return round(1000 * median(best), 4)


def measure(name: str, count: int) -> dict[str, Any]:
    grammar, rng = Grammar.load(name), np.random.default_rng(0)
    terminals = grammar.sizes[-1]
    sentences = [grammar.sample("test", 0, i).tokens for i in range(count)]
    rejected = [tokens for s in sentences if not grammar.contains(tokens := wrong(s, 1, terminals, rng))]
    near = [wrong(s, 3, terminals, rng) for s in sentences[: count // 2]]
    far = [rng.integers(1, terminals + 1, len(s)) for s in sentences[: count // 10]]
    cases = {
        "contains": (Grammar.contains, sentences),
        "contains, rejected": (Grammar.contains, rejected),
        "count_parses": (Grammar.count_parses, sentences),
        "parse": (Grammar.parse, sentences),
        "next_token_probs": (Grammar.next_token_probs, sentences),
        "min_substitutions, near": (Grammar.min_substitutions, near),
        "min_substitutions, far": (Grammar.min_substitutions, far),
    }
    times = {case: milliseconds(function, grammar, sequences) for case, (function, sequences) in cases.items()}
    before = peak_mb(reset=True)  # only now, as the compiler may have taken far more
    for function, sequences in cases.values():
        for tokens in sequences:
            function(grammar, tokens)
    after = peak_mb()
    return {
        "tokens_median": int(median(map(len, sentences))),
        "tokens_max": max(map(len, sentences)),
        "ms": times,
        "peak_growth_mb": None if before is None or after is None else round(after - before, 1),
    }


def peak_mb(reset: bool = False) -> float | None:
    """The peak memory of this process so far; reset: from now on. None if the system does not report it."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {platform.system()} {platform.machine()}, one core used"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two grammars and 40 sentences instead of nine and 100")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    names, count = (QUICK, 40) if options.quick else (BUILT_IN, 100)
    versions = {"canonlm": canonlm.__version__, "numba": numba.__version__, "numpy": np.__version__}
    result = {
        "grammars": {name: measure(name, count) for name in names},
        "release_ms": RELEASE_MS,
        "release_peak_mb": RELEASE_MB,
        "sentences": count,
        "machine": machine(),
        "versions": versions | {"python": platform.python_version()},
    }
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['machine']}; medians over {count} sentences; {result['versions']}")
    for name, row in result["grammars"].items():  # type: ignore[attr-defined]
        growth = "" if row["peak_growth_mb"] is None else f", peak memory + {row['peak_growth_mb']} MB"
        print(f"{name}: {row['tokens_median']} tokens (longest {row['tokens_max']}){growth}")
        for case, ms in row["ms"].items():
            release = RELEASE_MS.get(name, {}).get(case)
            print(f"  {case:24} {ms:9.3f} ms" + (f"   release {release / 1000:6.2f} s" if release else ""))


if __name__ == "__main__":
    main()
