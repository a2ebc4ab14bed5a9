"""A pytest plugin (`-p gpu_check.outcomes`) that tells the outcome of each test as it ends."""

import pytest

from gpu_check.events import tell


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    tell(test=nodeid, outcome="interrupted")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A phase of a test has ended: its call, or the set-up or tear-down that spoiled it."""
    if report.when != "call" and report.passed:
        return
    message = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        message = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        message = "; ".join(lines[:3]) or str(report.longrepr).splitlines()[-1]
    tell(test=report.nodeid, outcome=report.outcome, run_seconds=round(report.duration, 2), message=message[:500])
