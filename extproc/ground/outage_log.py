"""Log lines for an outage: one when it begins, and one when it is over."""

from logging import WARNING, Logger


class OutageLog:
    """Logs that something fails, once, and that it works again."""

    def __init__(
        self,
        log: Logger,
        begins: str,  # message of the first failure
        over: str = "",  # message of the end; empty: the end is not logged
        level: int = WARNING,  # of ``begins``
        each: bool = False,  # log a problem again when its text changes
        **extra: str,  # fields of both lines
    ) -> None:
        self.problem = ""  # the last failure's text; empty: there is no outage
        self._log = log
        self._begins = begins
        self._over = over
        self._level = level
        self._each = each
        self._extra = extra

    def failed(self, problem: object, traceback: Exception | None = None) -> None:
        """Records a failure and logs the first one."""
        before, self.problem = self.problem, str(problem) or repr(problem)
        if not before or (self._each and before != self.problem):
            extra = self._extra | {"error": self.problem}
            self._log.log(self._level, self._begins, extra=extra, exc_info=traceback)

    def recovered(self) -> None:
        """Ends the outage, if there is one, and logs its end."""
        if self.problem and self._over:
            self._log.warning(self._over, extra=self._extra)
        self.problem = ""
