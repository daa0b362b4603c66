"""Training: one loop for playground and pretraining. `config` loads no torch; `loop` does."""
