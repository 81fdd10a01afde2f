"""A page and pictures from the JSON of ``load``, ``compare``, ``simulate`` and ``overhead``."""

from benchmarks.report.markdown import writable, write

__all__ = ["writable", "write"]
