"""Builds layernorm_ext: the PEP 517 backend, the choice of CUDA, and the compiler flags."""

import platform


class BuildError(SystemExit):
    """Ends the build with a message; as a SystemExit it has no traceback."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"layernorm-ext cannot be built: {problem}; {remedy}.")


def check_system() -> None:
    """Raise a BuildError on systems other than Linux, whose compilers and system calls the build needs."""
    system = platform.system()
    if system != "Linux":
        name = "macOS" if system == "Darwin" else system
        raise BuildError(f"{name} is not supported", "use Linux (x86-64 or aarch64), on Windows in WSL 2")
