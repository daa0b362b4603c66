"""Every task in one or more settings, for tests that hold for all tasks."""

from canonlm import tasks

TASKS = [
    tasks.get("depo", N=12, K=4),
    tasks.get("depo", N=18, K=16, M=3, name_vocab=3, min_name_len=2, max_name_len=3),
    tasks.get("mano", L=4),
    tasks.get("mano", L=5, ops="asmd", modulus=7, synonyms=False),
    tasks.get("copying", N=6),
    tasks.get("copying", N=1),
    tasks.get("brevo", N=9),
    tasks.get("brevo", N=9, query="last_quarter", name_vocab=3, min_name_len=1, max_name_len=2),
    tasks.get("mqar", pairs=6, test_pairs=[9]),
    tasks.get("mano", L=5, test_lengths=[1, 4]),
    tasks.get("lano", grammar="cfg3h"),
    tasks.get("lano", grammar="small"),
    tasks.get("induction"),
    tasks.get("induction", N=20, triggers=50, shown=9),
    tasks.get("state"),
    tasks.get("state", group="A4xZ5", inputs="generators", N=5, test_lengths=[9]),
]
TASKS += [tasks.get(name) for name in tasks.names() if name not in {"capo", *(task.name for task in TASKS)}]
CAPO = tasks.get("capo", N=40, exposures=3)  # its windows are not those of `sample`
