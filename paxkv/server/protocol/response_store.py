"""`ResponseStore`: answers of /v1/responses that a client may come back to, within a bound."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.error_response import OverloadedError, UnknownResponseError
from paxkv.server.protocol.responses_bodies import ResponseBody

Items = list[dict[str, object]]
# Statuses of an answer that is still being made, in the background.
RUNNING_STATUSES = ("queued", "in_progress")
_ID_PREFIX = "resp_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One answer, as JSON: Python's objects would take many times the memory.

    Args:
        body: Of the response.
        items: The conversation that led to it, without the instructions.
        output: What the answer adds to the conversation.
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
    """Keeps as many answers as fit; those that nobody asked for the longest are dropped first.

    One that is still being made is never dropped: its client has nothing else of it.

    Args:
        max_bytes: Of all answers together; 0 stores none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # The one that was asked for last stands last.
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_enabled(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def check_enabled(self, param: str) -> None:
        """Whether a request may bring a field that needs the store.

        Raises:
            InvalidRequestError: The server stores nothing.
        """
        if not self.is_enabled:
            raise InvalidRequestError(
                f"{param} needs responses to be stored, which this server does not: it was started "
                "with --response-store-bytes 0. Leave it out, and send the whole conversation as "
                "input.",
                param=param,
            )

    def put(self, response: ResponseBody, items: Items) -> bool:
        """Stores an answer, or what has become of it; False where it is too large for that."""
        entry = _entry(response, items)
        before = self._stored.get(response.id)
        room = self._max_bytes - sum(e.num_bytes for e in self._kept(response.id))
        if entry.num_bytes > room:
            # Of one that was running, so that it does not stay so for ever.
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
        """Stores one that is made in the background.

        Raises:
            InvalidRequestError: It is larger than the whole store.
            OverloadedError: There is no room beside the others that are being made.
        """
        num_bytes = _entry(response, items).num_bytes
        if num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"a response in the background is stored, with its conversation; this one has "
                f"{num_bytes} bytes, the store {self._max_bytes}. Leave background out, or start "
                "the server with a larger --response-store-bytes.",
                param="background",
            )
        if not self.put(response, items):
            raise OverloadedError(
                "the store is full of responses that are being made in the background. Try again "
                "later."
            )

    def body(self, response_id: str) -> bytes:
        """A stored answer as JSON.

        Raises:
            UnknownResponseError: It is not there.
        """
        return self.get(response_id).body

    def get(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """A stored answer.

        Args:
            param: The field that names it.

        Raises:
            InvalidRequestError: It has no name of a response.
            UnknownResponseError: It is not there.
        """
        shown = response_id[:64]
        if not response_id.startswith(_ID_PREFIX):
            raise InvalidRequestError(
                f"{param} must be the id of a response, as in {_ID_PREFIX}5f0c, got {shown!r}.",
                param=param,
            )
        if response_id not in self._stored:
            why = (
                "none is with --response-store-bytes 0"
                if not self.is_enabled
                else "it was deleted, or never stored, or later ones have taken its place "
                "(--response-store-bytes), or the server was started again"
            )
            raise UnknownResponseError(
                f"the response {shown!r} is not stored: {why}. Send the whole conversation as "
                "input instead.",
                param=param,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def delete(self, response_id: str) -> None:
        """Forgets an answer, if it is there."""
        if response_id in self._stored:
            self._drop(response_id)

    def conversation(self, response_id: str) -> Items:
        """What an answer was given to, and the answer itself, to go on with.

        Raises:
            InvalidRequestError: It is not there, or has not ended well.
        """
        entry = self.get(response_id, param="previous_response_id")
        if entry.status not in ("completed", "incomplete"):
            raise InvalidRequestError(
                f"the response {response_id!r} is {entry.status}; wanted one that is completed, or "
                "incomplete.",
                param="previous_response_id",
            )
        return [*msgspec.json.decode(entry.items), *msgspec.json.decode(entry.output)]

    def _kept(self, new_id: str) -> Sequence[StoredResponse]:
        """Those that may not be dropped for another."""
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
