"""What does not work for a while: one line in the log when it begins, and one when it is over."""

from logging import WARNING, Logger


class Trouble:
    """The log's words for something that fails, and for its end, if that is told; ``extra`` says
    what it is. With ``each``, a problem that turns into another one has a line of its own."""

    def __init__(
        self,
        log: Logger,
        begins: str,
        over: str = "",
        level: int = WARNING,
        each: bool = False,
        **extra: str,
    ) -> None:
        self.problem = ""
        """What is wrong; empty: nothing."""
        self._log = log
        self._begins = begins
        self._over = over
        self._level = level
        self._each = each
        self._extra = extra

    def failed(self, problem: object, traceback: Exception | None = None) -> None:
        """That is wrong."""
        before, self.problem = self.problem, str(problem) or repr(problem)
        if not before or (self._each and before != self.problem):
            extra = self._extra | {"error": self.problem}
            self._log.log(self._level, self._begins, extra=extra, exc_info=traceback)

    def works(self) -> None:
        """Nothing is wrong, any more."""
        if self.problem and self._over:
            self._log.warning(self._over, extra=self._extra)
        self.problem = ""
