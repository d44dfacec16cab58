"""`python -m apportion`."""

from apportion.cli import app

app(prog_name="apportion")
