"""`stratarec doctor`: find what slows or stops runs on this machine; verify its GPU against the
CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stratarec.cli.arguments import print_lines, subcommand
from stratarec.errors import ConfigError

if TYPE_CHECKING:
    from stratarec.cli.checks.machine import Finding


def _options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu",
        nargs="?",
        const="",
        metavar="DEVICE",
        help="compare a GPU with the CPU for some minutes; required once before train.device can name the "
        "GPU (default: torch's accelerator)",
    )
    command.add_argument("--disk", metavar="FOLDER", help="measure the disk of FOLDER (default: TMPDIR)")


@subcommand(
    name="doctor",
    text="Find what slows or stops runs on this machine, and print what to change; "
    "verify a GPU against the CPU.",
    example="stratarec doctor --disk /mnt/nvme",
    options=_options,
)
def doctor(args: argparse.Namespace) -> None:
    """Examine this machine or its GPU, and fail if something must be changed."""
    from stratarec.cli.checks.machine import examine

    folder = Path(args.disk or tempfile.gettempdir())
    if not folder.is_dir():
        raise ConfigError(f"--disk must be a folder; got {folder}")
    findings = (
        list(map(_print_finding, examine(Path("/"), folder))) if args.gpu is None else _verify(args.gpu)
    )
    failed = sum(bool(finding.change) and finding.must for finding in findings)
    if failed:
        raise ConfigError(f"{failed} of {len(findings)} findings must be fixed first; see the lines above")
    print_lines("nothing must be changed")


def _verify(name: str) -> list[Finding]:
    import torch

    from stratarec.cli.checks.gpu import verify
    from stratarec.kernels.runtime.accelerator import open_device
    from stratarec.training.torch_setup import about, record, record_file

    default = torch.accelerator.current_accelerator(check_available=False)
    device = open_device(name or (default.type if default else "cuda"), "--gpu")
    if device.type == "cpu":
        raise ConfigError("--gpu is compared with the CPU and cannot be cpu: name a device such as cuda")
    print_lines(f"verifying {about(device)['device']}")
    findings, measurements = [], dict[str, float]()
    for finding, measured in verify(device):
        findings.append(_print_finding(finding))
        measurements |= measured
    if not any(finding.change for finding in findings):
        record(device, measurements)
        print_lines(f"recorded in {record_file()}")
    return findings


def _print_finding(finding: Finding) -> Finding:
    print_lines(f"{finding.subject:16} {finding.state}")
    if finding.change:
        print_lines(f"{'':16} change: {finding.change}")
    return finding
