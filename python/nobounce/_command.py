"""The command `nobounce`, which is a program of its own in this package."""

import os
import sys

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bin")


def main() -> None:
    program = os.path.join(FOLDER, "nobounce")
    if not os.path.exists(program):
        sys.exit("nobounce: this package was built without the command: install a wheel, or build it with tools/wheel")
    os.execv(program, ["nobounce", *sys.argv[1:]])


if __name__ == "__main__":
    main()
