"""KVEventPublisher: sends KV cache events over ZeroMQ, numbered, with replay of missed ones."""

import logging
import os
import threading
from collections import deque
from typing import Protocol

import msgspec
import zmq

from paxkv.config.engine_config import KVEventsConfig
from paxkv.contracts.observation import KVEventBatch
from paxkv.engine.kv_event_formats import WireBatch, WireFormat
from paxkv.errors import ConfigError, InvariantError

logger = logging.getLogger(__name__)

# Sequence number that ends a replay, with an empty payload.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
# Batches that are not with a subscriber when the engine ends get so long to arrive there.
_LINGER_MS = 1000
_MAX_HWM = 2**31 - 1


class KVEventPublisher(Protocol):
    """Takes the events of steps; every call comes from the engine's thread."""

    def publish(self, batch: KVEventBatch) -> None:
        """Takes one step's events and returns without waiting."""
        ...

    def close(self) -> None:
        """Sends what waits and ends; nothing may be published afterwards."""
        ...


class ZmqKVEventPublisher:
    """Publishes on a PUB socket, and answers for missed batches on a ROUTER socket.

        message          (topic, sequence number, msgpack of WireBatch)
        replay, asked    (sequence number to start from)
        replay, answer   (sequence number, msgpack) for each batch kept from there on,
                         then (-1, empty)

    Sequence numbers are 8 bytes, big-endian, from 0, one more for each batch. A batch that had to
    be dropped keeps its number, so a subscriber sees the gap; where replay does not fill it, the
    subscriber knows nothing of this engine's cache any more. (vLLM waits for room in the queue
    instead; here nobody who listens can slow a step down.)

    A replay is asked for from a DEALER socket; frames in front of the number, as an empty one,
    come back in front of each answer.

    Raises:
        ConfigError: An endpoint cannot be bound.

    Source: vLLM `distributed/kv_events.py`.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._max_queue_size = config.max_queue_size
        self._next_sequence_number = 0
        self._num_dropped = 0
        self._queue: deque[tuple[int, WireBatch]] = deque()
        self._wire_format = WireFormat(config)
        self._is_closing = threading.Event()
        sender = _Sender(config, self._queue, self._is_closing)
        self.endpoint = sender.endpoint
        self.replay_endpoint = sender.replay_endpoint
        self._wake_fd = sender.wake_fd
        # Where port 0 was asked for, nobody else says which one it became.
        replay = self.replay_endpoint or "nowhere"
        logger.info("KV cache events: published at %s, replayed at %s", self.endpoint, replay)
        # Starting the thread hands the sockets over: nobody else touches them from here on.
        self._thread = threading.Thread(target=sender.run, name="paxkv-kv-events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Batches lost because more than `max_queue_size` waited."""
        return self._num_dropped

    def publish(self, batch: KVEventBatch) -> None:
        """Queues one step's events; never waits, and drops the oldest one too many.

        Raises:
            InvariantError: It is closed.
        """
        if self._is_closing.is_set():
            raise InvariantError("events were published after close().")
        wire_batch = self._wire_format.convert(batch)
        if wire_batch is None:
            return
        # Numbered before it can be dropped.
        self._queue.append((self._next_sequence_number, wire_batch))
        self._next_sequence_number += 1
        if len(self._queue) > self._max_queue_size:
            self._drop_oldest()
        self._wake()

    def close(self) -> None:
        """Sends what waits and ends the thread, in about a second at most; may be repeated."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._wake()
        self._thread.join()
        os.close(self._wake_fd)

    def _wake(self) -> None:
        try:
            os.write(self._wake_fd, b"\0")
        except (BlockingIOError, BrokenPipeError):
            # The pipe is full of earlier calls, so the thread will wake; or it died, which was
            # logged, and is no reason to end the engine.
            return

    def _drop_oldest(self) -> None:
        try:
            self._queue.popleft()
        except IndexError:
            # The thread was faster, and has sent everything.
            return
        self._num_dropped += 1
        # At 1, 2, 4, 8, ...: the log must not fill up.
        if self._num_dropped & (self._num_dropped - 1) == 0:
            logger.warning(
                "%d KV event batches were dropped so far: more than max_queue_size=%d waited.",
                self._num_dropped,
                self._max_queue_size,
            )


class _Sender:
    """The thread's half: the sockets, and the batches kept for replay."""

    def __init__(
        self,
        config: KVEventsConfig,
        queue: deque[tuple[int, WireBatch]],
        is_closing: threading.Event,
    ) -> None:
        self._queue = queue
        self._is_closing = is_closing
        self._topic = config.topic.encode()
        # Sequence number and payload, oldest first.
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._router: zmq.Socket | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                # What is over the mark is dropped, the end of a replay too: one may wait for its
                # reader whole while the next is asked for.
                hwm = min(2 * (config.buffer_steps + 1), _MAX_HWM)
                self._router = self._bind(
                    zmq.ROUTER, "replay_endpoint", config.replay_endpoint, hwm
                )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _last_endpoint(self._pub)
        self.replay_endpoint = None if self._router is None else _last_endpoint(self._router)
        # Wakes the thread out of its poll: a socket could not be shared with who publishes.
        self._woken_fd, self.wake_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)

    def run(self) -> None:
        """The thread's body."""
        poller = zmq.Poller()
        poller.register(self._woken_fd, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        try:
            is_last = False
            while not is_last:
                ready = dict(poller.poll())
                if self._woken_fd in ready:
                    os.read(self._woken_fd, 65_536)
                # Asked before the queue is emptied: what was published before closing is sent.
                is_last = self._is_closing.is_set()
                self._send_queued()
                if self._router in ready:
                    self._answer_replay(self._router)
        finally:
            self._context.destroy(linger=_LINGER_MS)
            os.close(self._woken_fd)

    def _send_queued(self) -> None:
        while self._queue:
            try:
                number, batch = self._queue.popleft()
            except IndexError:
                # It was dropped in this very moment.
                return
            sequence_number = number.to_bytes(8, "big")
            payload = msgspec.msgpack.encode(batch)
            self._sent.append((sequence_number, payload))
            # Never blocks: a PUB socket drops what a slow subscriber has no room for.
            self._pub.send_multipart((self._topic, sequence_number, payload))

    def _answer_replay(self, router: zmq.Socket) -> None:
        # The envelope says who asks; it goes back in front of every answer.
        *envelope, start = router.recv_multipart()
        if len(start) == len(END_OF_REPLAY):
            for sequence_number, payload in self._sent:
                # Big-endian bytes of one length sort as their numbers do.
                if sequence_number >= start:
                    router.send_multipart((*envelope, sequence_number, payload))
        else:
            logger.warning("a replay was asked for with %d bytes instead of 8.", len(start))
        router.send_multipart((*envelope, END_OF_REPLAY, b""))

    def _bind(self, socket_type: int, name: str, endpoint: str, hwm: int) -> zmq.Socket:
        socket = self._context.socket(socket_type)
        socket.set_hwm(hwm)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {name}={endpoint!r} cannot be bound: {error.strerror}. "
                "Choose a free port and an address of this machine."
            ) from error
        return socket


def make_kv_event_publisher(config: KVEventsConfig | None) -> KVEventPublisher | None:
    """The publisher of `CacheConfig.kv_events`; None where there are to be no events.

    Raises:
        ConfigError: An endpoint cannot be bound.
    """
    return None if config is None else ZmqKVEventPublisher(config)


def _last_endpoint(socket: zmq.Socket) -> str:
    """Where the socket is bound, with the port that was free if any was asked for."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
