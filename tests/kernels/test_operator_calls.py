"""The operators get wrong arguments in random calls, and neither crash nor return wrong numbers."""

import subprocess
import sys
from pathlib import Path


def test_random_calls_are_right_or_refused_by_name():
    """In a process of their own, which a crash ends. 100,000 calls take some 2 minutes, see operator_calls.py."""
    command = [sys.executable, "-m", "support.operator_calls", "0", "3000", "--show"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
