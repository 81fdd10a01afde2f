"""Log of an outage: one line when the outage begins, and one when it is over."""

from logging import WARNING, Logger


class OutageLog:
    """Logs the first of several consecutive failures, and the success after the last."""

    def __init__(
        self,
        log: Logger,
        begins: str,  # message of the first failure
        over: str,  # message of the first success
        level: int = WARNING,  # of the line ``begins``
        each: bool = False,  # also log each later failure whose text is new
        **extra: str,  # fields of both lines
    ) -> None:
        self.problem = ""  # text of the last failure; empty: no outage
        self._log = log
        self._begins = begins
        self._over = over
        self._level = level
        self._each = each
        self._extra = extra

    def failed(self, problem: object, traceback: Exception | None = None, **remedy: str) -> None:
        """Records a failure. Logs the first failure of an outage and, if ``each`` is set, each
        failure whose text differs from the last one. ``remedy``: further fields of the line."""
        before, self.problem = self.problem, str(problem) or repr(problem)
        if not before or (self._each and before != self.problem):
            extra = self._extra | {"error": self.problem} | remedy
            self._log.log(self._level, self._begins, extra=extra, exc_info=traceback)

    def note(self, problem: str, traceback: Exception | None = None) -> None:
        """Records a failure with this problem or, if the text is empty, a success."""
        if problem:
            self.failed(problem, traceback)
        else:
            self.recovered()

    def recovered(self) -> None:
        """Ends the outage, if there is one, and logs its end."""
        if self.problem:
            self._log.info(self._over, extra=self._extra)
        self.problem = ""
