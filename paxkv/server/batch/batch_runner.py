"""Answers the lines of a batch with the routes of the server, several lines at once."""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus

import msgspec

from paxkv.config.server_config import ServerConfig
from paxkv.server.app import create_app
from paxkv.server.batch.batch_lines import (
    BatchLineError,
    BatchLineReader,
    BatchResponse,
    BatchRow,
)
from paxkv.server.batch.in_process_client import post_json
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.protocol.error_response import describe_error

# Lines in progress per place in the running batch. The second line is already tokenized and waits
# in the engine when the place becomes free.
_LINES_PER_PLACE = 2
_RESTART_POLL_S = 0.1


class BatchRunner:
    """Answers batches with one engine, which must have started.

    Args:
        config: Should have no API keys and no limits on requests, because these apply to batches.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self._engine = engine
        # The rows already contain what an access log would.
        config = dataclasses.replace(config, disable_uvicorn_access_log=True)
        self._app = create_app(engine, config)

    async def run(
        self, lines: Iterable[tuple[int, bytes]], write_row: Callable[[BatchRow], None]
    ) -> None:
        """Calls `write_row` once per line, in the order in which the requests finish.

        Cancelling this, or an exception of `write_row`, aborts the requests in progress.

        Args:
            lines: (line number, text that is not empty). A line is read when a worker is free.
        """
        numbered = iter(lines)
        reader = BatchLineReader()
        num_workers = _LINES_PER_PLACE * self._engine.model_info.max_num_seqs
        workers = [
            asyncio.ensure_future(self._work(numbered, reader, write_row))
            for _ in range(num_workers)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(
        self,
        lines: Iterator[tuple[int, bytes]],
        reader: BatchLineReader,
        write_row: Callable[[BatchRow], None],
    ) -> None:
        for number, line in lines:
            # Without waiting for a new engine, all remaining lines would fail.
            while not self._engine.is_alive:
                await asyncio.sleep(_RESTART_POLL_S)
            write_row(await self._answer(line, number, reader))

    async def _answer(self, line: bytes, number: int, reader: BatchLineReader) -> BatchRow:
        request_id = f"batch-{uuid.uuid4().hex}"
        try:
            request = reader.read(line, number)
        except BatchLineError as error:
            status, body = describe_error(error)
            return _row(error.custom_id, request_id, status, body)
        answer = await post_json(self._app, request.url, request.body, request_id=request_id)
        return _row(request.custom_id, request_id, answer.status, answer.body)


def _row(custom_id: str | None, request_id: str, status: int, body: bytes) -> BatchRow:
    is_answered = status == HTTPStatus.OK
    response = BatchResponse(
        status_code=status,
        request_id=request_id,
        body=msgspec.Raw(body) if is_answered else None,
    )
    return BatchRow(
        id=f"batch-row-{uuid.uuid4().hex}",
        custom_id=custom_id,
        response=response,
        error=None if is_answered else msgspec.Raw(body),
    )
