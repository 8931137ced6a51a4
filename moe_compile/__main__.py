"""`python -m moe_compile` is the command `moe-compile`."""

import sys

from .cli import main

sys.exit(main())
