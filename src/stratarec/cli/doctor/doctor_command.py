"""`stratarec doctor`: what of this machine slows or stops runs; whether its GPU computes as its CPU does."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.cli.arguments import Subcommand, say
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.cli.doctor.finding import Finding


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu", nargs="?", const="", metavar="DEVICE",
        help="verify a GPU against the CPU, some minutes, as train.device asks for (default: the one that torch names)",
    )  # fmt: skip
    command.add_argument("--disk", metavar="FOLDER", help="on the disk that is measured (default: TMPDIR)")


def doctor(args: argparse.Namespace) -> None:
    """What of this machine slows or stops runs; whether its GPU computes as its CPU does."""
    from stratarec.cli.doctor.examine_machine import examine

    folder = Path(args.disk or tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"--disk is {folder}, expected a folder")
    found = list(map(_told, examine(Path("/"), folder))) if args.gpu is None else _verified(args.gpu)
    failed = sum(bool(finding.change) and finding.must for finding in found)
    if failed:
        raise ConfigError(f"{failed} of {len(found)} findings must be changed first; they are above")
    say("nothing must be changed")


def _verified(name: str) -> list[Finding]:
    import torch

    from stratarec.cli.doctor.verify_gpu import verify
    from stratarec.kernels.runtime.accelerator import open_device
    from stratarec.training.torch_setup import about, record, record_file

    built = torch.accelerator.current_accelerator(check_available=False)
    device = open_device(name or (built.type if built else "cuda"), "--gpu")
    if device.type == "cpu":
        raise ConfigError("--gpu is cpu, which is what devices are compared with: name one such as cuda")
    say(f"verifying {about(device)['device']}")
    found, figures = [], dict[str, float]()
    for finding, more in verify(device):
        found.append(_told(finding))
        figures |= more
    if not any(finding.change for finding in found):
        record(device, figures)
        say(f"{record_file()} says so")
    return found


def _told(finding: Finding) -> Finding:
    say(f"{finding.what:16} {finding.said}")
    if finding.change:
        say(f"{'':16} change: {finding.change}")
    return finding


COMMAND = Subcommand(
    name="doctor",
    text="Say what of this machine slows or stops runs, and what to change; verify a GPU against the CPU.",
    example="stratarec doctor --disk /mnt/nvme",
    options=_options,
    run=doctor,
)
