"""`python -m octavo.cli` is `octavo`."""

from __future__ import annotations

import sys

from octavo.cli import main

sys.exit(main())
