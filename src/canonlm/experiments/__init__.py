"""Experiments as data: the paper's figures (`figures/*.yaml`), their runs, and verdicts on the paper's claims.

`schema` is the format of the files, `grid` turns one into runs, `plan` gives the next runs, `outcomes` reads finished
runs, `verdicts` judges claims, `replicate` works through an experiment. `claims.yaml` has the paper's claims, and
`claims` gives the ledger. `profile` and `profiled` are the runs of a profile and their numbers.
`published` has the paper's and the release's own numbers, in the columns of `canonlm.runs.table`.
"""
