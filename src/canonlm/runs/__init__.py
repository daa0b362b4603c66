"""Run folders: what is in one, who may continue it, which run it is, and how to follow it while it goes on."""
