"""Freed memory stays with the process, so a step that reuses the last one's memory causes no page faults."""

import os
import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource, torch
from canonlm.train.machine import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(25 << 18) for _ in range(6)]  # 26 MB each
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = [faults() for _ in range(3)][-1]
keep_freed_memory()
print(before, [faults() for _ in range(4)][-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_the_second_step_makes_no_page_faults():
    # glibc's initial thresholds; it raises them over time, and then chance decides.
    env = os.environ | dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**17))
    done = subprocess.run([sys.executable, "-c", ROUNDS], env=env, capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert usual > 10_000  # 150 MB are 38,000 pages
    assert kept < 100
