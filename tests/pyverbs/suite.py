"""Runs rdma-core's tests that are for any device, and prints what passed, failed and was skipped, with the reasons.

Usage: suite.py FOLDER OPTION..., where FOLDER is rdma-core's tests and the options are the suite's own (--dev nb0, --gid 0).
"""

import importlib
import os
import sys
import types
import unittest
from collections import defaultdict

# Written for the commands of one vendor's adapter.
VENDOR = ("mlx5", "efa")


def modules(folder):
    """The modules of the suite, as its own runner names them."""
    package = types.ModuleType("tests")
    package.__path__ = [folder]
    sys.modules["tests"] = package
    for name in sorted(os.listdir(folder)):
        if name.startswith("test_") and name.endswith(".py") and not any(vendor in name for vendor in VENDOR):
            yield importlib.import_module(f"tests.{name[:-3]}")


class Result(unittest.TextTestResult):
    """Counts what passed, too."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main():
    folder = sys.argv[1]
    sys.argv[1:] = sys.argv[2:]
    sys.path.insert(0, folder)
    from args_parser import parser

    parser.parse_args()
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(loader.loadTestsFromModule(module) for module in modules(folder))
    # One line for each test only if asked: 170 are a lot to read.
    verbosity = 2 if "--verbose" in sys.argv else 0
    result = unittest.TextTestRunner(resultclass=Result, verbosity=verbosity).run(suite)
    reasons = defaultdict(list)
    for test, reason in result.skipped:
        reasons[reason].append(test.id().removeprefix("tests."))
    for reason, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"skipped {len(tests)}: {reason}")
        for name in sorted(tests):
            print(f"    {name}")
    broken = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print(f"pyverbs: {result.testsRun} tests, {result.passed} passed, {broken} failed, {len(result.skipped)} skipped")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
