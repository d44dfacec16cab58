"""One self-contained HTML page, and its twin for the terminal, from the records of a run."""

from apportion.report.page import write_page

__all__ = ["write_page"]
