"""One self-contained HTML page, and its twins for the terminal and for programs, from the records of a run."""

from apportion.report.page import write_page
from apportion.report.twin import read_page

__all__ = ["read_page", "write_page"]
