"""Run folders: their content, leases, the identity of a run, statistics over runs, and following a run in progress."""
