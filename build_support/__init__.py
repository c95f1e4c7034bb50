"""Builds layernorm_ext: the PEP 517 backend, the choice of CUDA, and the compiler flags."""


class BuildError(SystemExit):
    """Ends the build with a message; as a SystemExit it has no traceback."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"layernorm-ext cannot be built: {problem}; {remedy}.")
