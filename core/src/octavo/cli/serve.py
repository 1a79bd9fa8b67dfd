"""`octavo serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse

from octavo.command import Command, add_engine_settings, add_settings, given
from octavo.config import EngineConfig
from octavo.errors import ConfigError


class Serve(Command):
    """Serves a model over HTTP."""

    name = "serve"
    help = "Serve a model over HTTP, with the OpenAI API."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from octavo.server.settings import ServerSettings

        add_engine_settings(parser)
        add_settings(parser.add_argument_group("server"), ServerSettings)

    def run(self, options: argparse.Namespace) -> int:
        from octavo.server.settings import ServerSettings

        engine, server = EngineConfig.model_fields, ServerSettings.model_fields
        values = given(options, *engine)
        if options.model_path is not None and values.setdefault("model", options.model_path) != options.model_path:
            raise ConfigError(f"two models are named: {options.model_path}, and --model {values['model']}")
        config = EngineConfig.load(values, options.config, others=server)
        settings = ServerSettings.load(given(options, *server), options.config, others=engine)

        from octavo.server.serve import serve

        return serve(config, settings)
