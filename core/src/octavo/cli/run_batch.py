"""`octavo run-batch`: a file of OpenAI requests in, a file of answers out, without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from octavo.command import Command, add_engine_settings, engine_config
from octavo.errors import ConfigError


class RunBatch(Command):
    """Answers a file of OpenAI requests."""

    name = "run-batch"
    help = "Answer a JSONL file of OpenAI requests (chat, completions, responses). Exit code: 1 if any line failed."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_engine_settings(parser)
        parser.add_argument(
            "-i", "--input-file", required=True, metavar="IN", help="One request a line: custom_id, method, url, body."
        )
        parser.add_argument("-o", "--output-file", required=True, metavar="OUT", help="One answer a line, in no order.")
        parser.add_argument("--resume", action="store_true", help="Keep the answers that OUT has, and do the others.")
        parser.add_argument(
            "--served-model-name", metavar="NAME", help="What requests call the model. Default: its path."
        )
        parser.add_argument(
            "--max-in-flight", type=int, metavar="N", help="Most requests at once. Default: 2 x --max-num-seqs."
        )

    def run(self, options: argparse.Namespace) -> int:
        if options.max_in_flight is not None and options.max_in_flight < 1:
            raise ConfigError(f"--max-in-flight {options.max_in_flight}: expected 1 or more")
        from octavo.server.batch import answer_batch

        result = answer_batch(
            engine_config(options),
            Path(options.input_file),
            Path(options.output_file),
            resume=options.resume,
            max_in_flight=options.max_in_flight,
            served_model_name=options.served_model_name,
        )
        print(result, file=sys.stderr)
        return 1 if result.failed else 0
