"""How a command says that it did not do what it was asked to."""


class CommandError(Exception):
    """It could not: each problem is a line that says why, and what to do."""

    status = 1

    def __init__(self, *problems: object) -> None:
        super().__init__(*problems)
        self.problems = problems


class UsageError(CommandError):
    """It was wrongly asked: by flags that do not go together, or a wrong configuration."""

    status = 2
