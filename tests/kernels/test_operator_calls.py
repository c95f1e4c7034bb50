"""The operators get invalid arguments in random calls, and neither crash nor return wrong numbers."""

import subprocess
import sys
from pathlib import Path


def test_random_calls_are_exact_or_raise_an_error_that_names_an_argument():
    """The calls run in another process, which may crash. operator_calls.py says how to make 100,000 in 2 minutes."""
    command = [sys.executable, "-m", "support.operator_calls", "0", "3000", "--show"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
