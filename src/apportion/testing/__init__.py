"""The conformance suite: what every credit method must do, for our methods and for those of other packages.

from apportion.testing import LAWS

A law takes a configured method and fails with an AssertionError. It needs pytest (`pip install 'apportion[testing]'`).
"""

from apportion.testing.laws import LAWS, Law

__all__ = ["LAWS", "Law"]
