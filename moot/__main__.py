"""`python -m moot` is `moot`."""

import sys

from moot.cli import main

sys.exit(main())
