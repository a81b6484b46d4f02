"""Checks for packages that define models and codecs. Each raises `AssertionError` if a contract is
broken.

Our own tests use them, too. Call them from a test of any framework.
"""

from stratarec.testing.codecs import check_codec as check_codec
from stratarec.testing.models import check_score as check_score
