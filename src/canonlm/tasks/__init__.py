"""The synthetic tasks: no torch, every sample a pure function of (seed, split, window, j)."""

from canonlm.tasks.compiled import cache_by_content

with cache_by_content():
    from canonlm.tasks.base import Placed, Query, Sample, Slice, Task, Verdict, Vocab, get, names, register
    from canonlm.tasks.brevo import Brevo
    from canonlm.tasks.capo import Capo
    from canonlm.tasks.copying import Copying
    from canonlm.tasks.depo import Depo
    from canonlm.tasks.lano import Lano
    from canonlm.tasks.mano import Mano
    from canonlm.tasks.mqar import Mqar
    from canonlm.tasks.spec import TaskSpec
    from canonlm.tasks.windows import Windows

__all__ = [
    "Brevo",
    "Capo",
    "Copying",
    "Depo",
    "Lano",
    "Mano",
    "Mqar",
    "Placed",
    "Query",
    "Sample",
    "Slice",
    "Task",
    "TaskSpec",
    "Verdict",
    "Vocab",
    "Windows",
    "get",
    "names",
    "register",
]
