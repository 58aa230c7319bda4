"""What an image installs before the project's own code: requirements of some extras of pyproject.toml, one a line.

    python3 deploy/docker/requirements.py EXTRA [EXTRA...] [--without NAME...]

A changed line of code then reuses the layer that these are in.
"""

import argparse
import re
import tomllib
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*")
    parser.add_argument("--without", nargs="*", default=[])
    options = parser.parse_args()
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in options.extras:
        wanted += project["optional-dependencies"][extra]
    for requirement in dict.fromkeys(wanted):
        if re.split(r"[^\w.-]", requirement, maxsplit=1)[0] not in options.without:
            print(requirement)


if __name__ == "__main__":
    main()
