"""What `stratarec check` reads, and says of it."""

from stratarec.cli.check.artefacts import check

__all__ = ["check"]
