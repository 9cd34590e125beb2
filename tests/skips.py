"""A pytest plugin: after the results, one line for each reason why tests were skipped."""

from collections import Counter


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report) for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


def _reason(report):
    _path, _line, reason = report.longrepr
    return reason.removeprefix("Skipped: ")
