"""`python -m octavo.entrypoints.openai.api_server --model M`: `octavo serve M` under the name that vLLM's scripts use."""

from __future__ import annotations

import sys

from octavo.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
