"""Whether the GPU kernels are right at real sizes, and how fast: python benchmarks/gpu/run.py [--quick] [--only PART] --out DIR

Speeds are held against what copying and bf16 products reach on the same chip in the same minute. Writes DIR/gpu.json and
DIR/gpu.txt. In full it takes less than six minutes on an H200, with --quick less than two. --tiny needs no GPU: it runs small
shapes under Triton's interpreter, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib import import_module
from pathlib import Path

PARTS = ("attention", "linear", "graph", "e2e")
WITHOUT_GPU = ("attention", "linear")
"""Those that --tiny runs."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, less time for each")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="no GPU: small shapes, interpreted")
    options = parser.parse_args(arguments)
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

    import torch
    from frame import Context, table

    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA device is here; --tiny shows that the script works", file=sys.stderr)
        return 2
    context = Context(options.quick, options.tiny, torch.device("cpu" if options.tiny else "cuda"))
    machine = platform.machine() if options.tiny else torch.cuda.get_device_name()
    parts = [part for part in options.only or PARTS if not options.tiny or part in WITHOUT_GPU]
    found = {"machine": machine, "torch": torch.__version__, "quick": options.quick, "parts": {}, "seconds": {}}
    texts = []
    for part in ["ceilings", *parts]:
        start = time.monotonic()
        try:
            rows = context.find_ceilings() if part == "ceilings" else import_module(part).run(context)
        except ImportError as error:
            rows = [{"what": f"left out: {error}"}]
        except RuntimeError as error:  # one part that fails must not cost the others
            rows = [{"what": f"failed: {error}", "right": False}]
        found["parts"][part], found["seconds"][part] = rows, time.monotonic() - start
        texts.append(f"{part} ({found['seconds'][part]:.0f} s)\n{table(rows)}\n")
        print(texts[-1], flush=True)
        options.out.mkdir(parents=True, exist_ok=True)  # after each part: what is measured is kept
        (options.out / "gpu.json").write_text(json.dumps(found, indent=1))
        (options.out / "gpu.txt").write_text(f"{machine}\n\n" + "\n".join(texts))
    wrong = [row for rows in found["parts"].values() for row in rows if row.get("right") is False]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
