"""`canonlm check` on every causal model of the installed transformers that can be built here, with random weights.

python benchmarks/check_library.py            # all: benchmarks/results/check-library.json, docs/check.md
python benchmarks/check_library.py lfm2 rwkv  # some, printed
"""

import argparse
import json
import signal
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "check-library.json", HERE.parent / "docs" / "check.md"
BEGIN, END = "<!-- table: benchmarks/check_library.py -->", "<!-- end of table -->"
LIMIT_S = 120
LISTED = (
    *("bloom", "cohere2", "deepseek_v3", "exaone4", "falcon", "falcon_h1", "gemma2", "gemma3_text", "glm4", "gpt2"),
    *("gpt_neox", "gpt_oss", "granite", "granitemoehybrid", "inkling", "jamba", "lfm2", "llama", "mamba", "mamba2"),
    *("minimax", "mistral", "mixtral", "nemotron_h", "olmo2", "olmo3", "opt", "phi3", "qwen2", "qwen3", "qwen3_5"),
    *("qwen3_moe", "qwen3_next", "recurrent_gemma", "rwkv", "smollm3", "xlstm", "zamba2"),
)
"""Types that have a row on the page even if nothing is wrong."""


def check(name: str) -> dict:
    import torch

    from canonlm.canonize import check
    from canonlm.models.build import build
    from canonlm.models.interface import Sizes

    sizes = Sizes(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=97, seq_len=64)
    try:
        model = build(f"hf:{name}", sizes).module.eval()
    except ValueError as error:
        return {"built": str(error)[:300]}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # weights large enough that a wrong token shows
        for parameter in model.parameters():
            if parameter.ndim == 2:
                scale = parameter.shape[1] ** -0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    signal.alarm(LIMIT_S)
    try:
        outcomes = check.decoding(model)
    finally:
        signal.alarm(0)
    return {o.case: {"state": o.state, "error": o.error, "detail": o.detail} for o in outcomes}


def write_table(data: dict) -> None:
    from canonlm.canonize.check import CASES

    rows = data["types"]
    causality = {name: row["causality"]["state"] for name, row in rows.items() if "causality" in row}
    blind = [name for name, state in causality.items() if state == "differs"]
    causal = {name: rows[name] for name, state in causality.items() if state == "passed"}
    wrong = {name: [case for case in CASES if row[case]["state"] == "differs"] for name, row in causal.items()}
    right = sum(not cases for cases in wrong.values())
    lines = [
        f"transformers {data['transformers']}, {len(causal)} causal types with random weights (4 layers, width 64, "
        f"float32; `benchmarks/check_library.py`): {right} give no wrong answer, {len(causal) - right} at least one. "
        f"{len(blind)} other types are left out, because their tokens see later ones by default: {', '.join(blind)}.",
        "",
        "| case | wrong, no error | error |",
        "|---|---|---|",
    ]
    for case in CASES:
        states = [row[case]["state"] for row in causal.values()]
        lines.append(
            f"| {case} | {states.count('differs')} | {len(states) - states.count('differs') - states.count('passed')} |"
        )
    lines += ["", "| type | wrong, no error | error |", "|---|---|---|"]
    for name, row in causal.items():
        if wrong[name] or name in LISTED:
            errors = [f"{case} ({row[case]['error']:.1g})" for case in wrong[name]]
            raised = [case for case in CASES if row[case]["state"] in ("refused", "failed")]
            lines.append(f"| `{name}` | {', '.join(errors)} | {', '.join(raised)} |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


def main() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def time_out(*_: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, time_out)
    rows = {}
    for name in arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            rows[name] = check(name)
        except TimeoutError as error:
            rows[name] = {"hangs": str(error)}
        except Exception as error:  # a model that does not run at all
            rows[name] = {"built": f"{type(error).__name__}: {str(error)[:200]}"}
        states = {case: row for case, row in rows[name].items() if isinstance(row, dict) and row["state"] == "differs"}
        print(
            name, {case: f"{row['error']:.1e}" for case, row in states.items()}, rows[name].get("built", ""), flush=True
        )
    if not arguments.types:
        data = {"transformers": transformers.__version__, "types": rows}
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        write_table(data)


if __name__ == "__main__":
    main()
