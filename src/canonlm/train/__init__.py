"""Training: one loop for playground and pretraining. `config` and `files` are light; `loop` loads torch."""
