"""The one way a build is refused."""


class BuildError(SystemExit):
    """Ends the build with a sentence; being a SystemExit, it reaches the user without a traceback."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(f"layernorm-ext cannot be built: {problem}; {remedy}.")
