"""`ResponseStore`: keeps responses of /v1/responses for later requests, in limited memory."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.error_response import OverloadedError, UnknownResponseError
from paxkv.server.protocol.responses.bodies import ResponseBody

Items = list[dict[str, object]]
# Statuses of a response that is still being made in the background.
RUNNING_STATUSES = ("queued", "in_progress")
_ID_PREFIX = "resp_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response as JSON, because Python's objects would take many times the memory.

    Args:
        body: The response's body.
        items: The conversation before the response, without instructions.
        output: The items that the response adds to the conversation.
    """

    status: str
    body: bytes
    items: bytes
    output: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.body) + len(self.items) + len(self.output)

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING_STATUSES


class ResponseStore:
    """Stores as many responses as fit, and drops the least recently used ones first.

    A response that is still being made is never dropped, because its client has no copy of it.

    Args:
        max_bytes: Limit on all responses together; 0 stores none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # The most recently used response is the last one.
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_enabled(self, param: str) -> None:
        """Checks that a request may have a field that needs the store.

        Raises:
            InvalidRequestError: The server stores nothing.
        """
        if not self.is_enabled:
            raise InvalidRequestError(
                f"{param} needs stored responses, but this server was started with "
                "--response-store-bytes 0. Leave it out, and send the whole conversation as input.",
                param=param,
            )

    def put(self, response: ResponseBody, items: Items) -> bool:
        """Stores a response in place of its earlier state; False if it is too large."""
        entry = _entry(response, items)
        before = self._stored.get(response.id)
        room = self._max_bytes - sum(e.num_bytes for e in self._kept(response.id))
        if entry.num_bytes > room:
            # If the earlier state is "in_progress", it must not stay so.
            if before is not None:
                self._drop(response.id)
            return False
        if before is not None:
            self._drop(response.id)
        self._make_room(entry.num_bytes)
        self._stored[response.id] = entry
        self._num_bytes += entry.num_bytes
        return True

    def put_running(self, response: ResponseBody, items: Items) -> None:
        """Stores a response that is made in the background.

        Raises:
            InvalidRequestError: The response is larger than the whole store.
            OverloadedError: Other responses in the background leave too little room.
        """
        num_bytes = _entry(response, items).num_bytes
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"a response in the background is stored with its conversation; they have "
                f"{num_bytes} bytes, but the store has only {self._max_bytes}. Leave background "
                "out, or start the server with a larger --response-store-bytes.",
                param="background",
            )
        if not self.put(response, items):
            raise OverloadedError(
                "the store is full of responses that are being made in the background. Try again "
                "later."
            )

    def get(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """Returns a stored response, which then counts as the most recently used one.

        Args:
            param: The field that contains the id.

        Raises:
            InvalidRequestError: `response_id` is not the id of a response.
            UnknownResponseError: The response is not stored.
        """
        shown = response_id[:64]
        if not response_id.startswith(_ID_PREFIX):
            raise InvalidRequestError(
                f"{param} must be the id of a response, as in {_ID_PREFIX}5f0c, got {shown!r}.",
                param=param,
            )
        if response_id not in self._stored:
            why = (
                "the server was started with --response-store-bytes 0"
                if not self.is_enabled
                else "it was deleted, or never stored, or dropped for later ones "
                "(--response-store-bytes), or the server was restarted"
            )
            raise UnknownResponseError(
                f"the response {shown!r} is not stored: {why}. Send the whole conversation as "
                "input instead.",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def delete(self, response_id: str) -> None:
        """Deletes a response if it is stored."""
        if response_id in self._stored:
            self._drop(response_id)

    def conversation(self, response_id: str) -> Items:
        """The conversation up to a response and including it.

        Raises:
            InvalidRequestError: The response is not stored, or is neither completed nor incomplete.
        """
        entry = self.get(response_id, param="previous_response_id")
        if entry.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"the response {response_id!r} is {entry.status}; send the id of one that is "
                "completed or incomplete.",
                param="previous_response_id",
            )
        return [*msgspec.json.decode(entry.items), *msgspec.json.decode(entry.output)]

    def _kept(self, new_id: str) -> Sequence[StoredResponse]:
        """The other responses that must not be dropped."""
        return [e for i, e in self._stored.items() if e.is_running and i != new_id]

    def _make_room(self, num_bytes: int) -> None:
        for response_id in list(self._stored):
            if self._num_bytes + num_bytes <= self._max_bytes:
                return
            if not self._stored[response_id].is_running:
                self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._stored.pop(response_id).num_bytes


def _entry(response: ResponseBody, items: Items) -> StoredResponse:
    return StoredResponse(
        status=response.status,
        body=msgspec.json.encode(response),
        items=msgspec.json.encode(items),
        output=msgspec.json.encode(response.output),
    )
