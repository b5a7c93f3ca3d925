"""`paxkv run-batch`: answers a file of requests in OpenAI's batch format, without a server."""

from paxkv.entrypoints.command_end import (
    TERMINATED,
    Terminated,
    end_by_signals,
    ended_by_sigterm,
    run_command,
)

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

import msgspec
from tqdm import tqdm

from paxkv.client.async_client import AsyncEngineClient
from paxkv.config.command_line import add_config_flags, config_from_arguments
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.build_client import build_async_client
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments
from paxkv.entrypoints.cli.batch_input import BatchInput
from paxkv.entrypoints.cli.command_parser import CommandParser
from paxkv.entrypoints.cli.line_file import STDIO, LineFile
from paxkv.entrypoints.engine_flags import ENGINE_CONFIG_CLASSES, engine_config_from_arguments
from paxkv.entrypoints.process_logging import set_up_logging
from paxkv.entrypoints.run_until_sigterm import run_until_sigterm
from paxkv.errors import ConfigError, EngineDeadError, PaxkvError
from paxkv.package_origin import check_package_origin
from paxkv.server.batch.batch_lines import BATCH_URLS, BatchRow
from paxkv.server.batch.batch_runner import BatchRunner
from paxkv.server.metrics.stats_log import StatsLog

# Settings of a server's port and of its clients, which a batch does not have.
_SERVER_ONLY_SETTINGS = (
    *("host", "port", "root_path", "max_waiting_requests", "max_header_bytes", "max_connections"),
    *("request_timeout_s", "shutdown_timeout_s", "api_key", "ssl_keyfile", "ssl_certfile"),
    *("ssl_ca_certs", "ssl_cert_reqs", "allowed_origins", "allowed_methods", "allowed_headers"),
    *("allow_credentials", "disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
    *("response_store_bytes", "enable_admin", "profile_dir", "enable_inspector"),
    *("inspector_show_text", "inspector_max_trace_bytes", "max_num_queued_reqs"),
    *("disable_fastapi_docs", "enable_tokenizer_info_endpoint", "h11_max_header_count"),
    *("max_unread_bytes", "max_step_seconds"),
)
_URL_BEGINNINGS = ("http://", "https://")


class BatchFileError(PaxkvError):
    """The input cannot be read, or the output not written."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers every line of the input; returns the exit code of the process."""
    parser = make_parser()
    namespace = parse_arguments(parser, arguments)
    # argparse's `required` is not used, because a config file may name the files.
    if namespace.input_file is None or namespace.output_file is None:
        parser.error("--input-file (-i) and --output-file (-o) are required; - is stdin or stdout.")
    set_up_logging()
    try:
        # Without this check, the engine process would fail without a reason.
        check_package_origin()
        engine_config = engine_config_from_arguments(namespace)
        server_config = config_from_arguments(ServerConfig, namespace)
        # Open the files before the engine starts, so that a bad file name is reported immediately.
        with (
            _open_input(namespace.input_file) as lines,
            _open_output(namespace) as output,
            ended_by_sigterm(),
        ):
            engine = build_async_client(engine_config, server_config, show_progress=True)
            num_rows, num_failed = run_until_sigterm(
                run(engine, server_config, lines, output, name=namespace.output_file)
            )
    except (ConfigError, EngineDeadError, BatchFileError) as error:
        print("paxkv: error:", *str(error).splitlines(), file=sys.stderr)
        return 1
    except Terminated:
        # So the exit status of the process names the signal.
        signal.raise_signal(signal.SIGTERM)
        return TERMINATED
    print(
        f"paxkv: {num_rows - num_failed} of {num_rows} requests answered, {num_failed} failed; "
        f"the rows are in {_shown(namespace.output_file, 'stdout')}.",
        file=sys.stderr,
    )
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags of `paxkv serve` without settings of its port and clients, plus two file flags."""
    parser = CommandParser(
        prog="paxkv run-batch",
        description="Answers the requests of a file in OpenAI's batch format, without a server. A "
        'line of the input is {"custom_id": ..., "method": "POST", "url": ..., "body": {...}}, '
        f"with the url {' or '.join(BATCH_URLS)}. A line of the output has its custom_id and "
        "either a response or an error. Rows are in the order in which the requests finish.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *("-i", "--input-file"), metavar="FILE", help="requests, one per line; - reads stdin"
    )
    parser.add_argument(
        *("-o", "--output-file"),
        metavar="FILE",
        help="answers, one per line; - writes to stdout. The file's old contents are kept until "
        "the engine is ready",
    )
    for config_class in ENGINE_CONFIG_CLASSES:
        add_config_flags(parser, config_class)
    add_config_flags(parser, ServerConfig, without=_SERVER_ONLY_SETTINGS)
    add_serve_arguments(parser)
    return parser


async def run(
    engine: AsyncEngineClient,
    config: ServerConfig,
    lines: BatchInput,
    output: LineFile,
    *,
    name: str,
) -> tuple[int, int]:
    """Starts the engine, answers the lines, and ends the engine.

    Returns:
        Number of written rows, and number of errors among them.

    Args:
        name: Path of the output, for error messages.

    Raises:
        EngineDeadError: The engine has ended and is not replaced.
        BatchFileError: A row cannot be written.
    """
    num_rows = num_failed = 0
    tasks: list[asyncio.Task[object]] = []

    def write_row(row: BatchRow) -> None:
        nonlocal num_rows, num_failed
        num_rows += 1
        num_failed += row.error is not None
        with _reported(name):
            output.write_line(msgspec.json.encode(row))
        progress.update()

    # `disable=None` draws the bar only if stderr is a terminal.
    with tqdm(total=lines.num_lines, desc="Running batch", unit="req", disable=None) as progress:
        try:
            await engine.start()
            with _reported(name):
                output.clear()
            work = asyncio.create_task(BatchRunner(engine, config).run(lines, write_row))
            watcher = asyncio.create_task(engine.wait_until_ended())
            tasks += [work, watcher]
            if not config.disable_log_stats:
                tasks.append(
                    asyncio.create_task(StatsLog(engine, config.log_stats_interval_s).run())
                )
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineDeadError(f"the engine has ended: {watcher.result()}")
            work.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.close(drain_timeout_s=0.0)
    return num_rows, num_failed


def _open_input(path: str) -> BatchInput:
    if path.startswith(_URL_BEGINNINGS):
        raise BatchFileError(
            f"the input file {path} is a URL; run-batch reads local files only. Download it first."
        )
    try:
        return BatchInput(path)
    except OSError as error:
        raise BatchFileError(
            f"the input file {_shown(path, 'stdin')} cannot be read: {error.strerror}."
        ) from error


def _open_output(namespace: argparse.Namespace) -> LineFile:
    path = namespace.output_file
    if path.startswith(_URL_BEGINNINGS):
        raise BatchFileError(
            f"the output file {path} is a URL; run-batch writes local files only. Write a local "
            "file and upload it."
        )
    with _reported(path):
        # Compare regular files only, because both may be /dev/null.
        is_input = os.path.isfile(path) and os.path.exists(namespace.input_file)
        if is_input and os.path.samefile(path, namespace.input_file):
            raise BatchFileError(
                f"the output file {path} is the input file, which would be lost; name another."
            )
        return LineFile(path)


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    """Turns an OSError into a `BatchFileError` that names the output file."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) and path == STDIO:
            # `run_command` ends quietly when the reader of stdout is gone (`| head -1`).
            raise
        raise BatchFileError(
            f"the output file {_shown(path, 'stdout')} cannot be written: {error.strerror}."
        ) from error


def _shown(path: str, stdio: str) -> str:
    return stdio if path == STDIO else path


if __name__ == "__main__":
    sys.exit(run_command(main))
